//! The text that routers are recorded over if no other is given: prose, tables and code of this project, which every copy of the
//! program has.

/// In this order: the beginning of it is what is read.
const PARTS: [&str; 5] = [
    include_str!("../../../docs/architecture.md"),
    include_str!("../../model/router.rs"),
    include_str!("../../../docs/requests.md"),
    include_str!("../../sched/neo.rs"),
    include_str!("../../../docs/scheduling.md"),
];

/// Some 60 KB, 15 thousand tokens.
pub fn router_text() -> String {
    PARTS.join("\n")
}
