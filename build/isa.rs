//! The least version of the PTX language that a text needs, by its instructions, and the text lowered to it.
//!
//! nvcc writes its own version on top (9.0 for CUDA 13.0), which only a driver as new as the compiler reads. What the
//! instructions need is older. The versions below are those of the PTX ISA's "Release Notes" and of the "PTX ISA Notes"
//! of each instruction; `scripts/check-ptx` proves them with the assembler of CUDA 12.0, which refuses an
//! instruction that is newer than the version on top.
//!
//! An instruction that is not in the table keeps nvcc's version for its file, with a warning: guessing would
//! move the failure to a user's machine.

use std::collections::{BTreeMap, BTreeSet};

/// Major and minor.
pub type Version = (u32, u32);

/// Known to every version that knows compute capability 7.5.
const PLAIN: &str = "abs activemask add addc and atom bar barrier bfe bfi bfind bra brev brkpt brx call clz cnot copysign \
     cos cvt cvta div dp2a dp4a ex2 exit fma fns isspacep ld ldu lg2 lop3 mad mad24 madc match max membar min mov mul \
     mul24 nanosleep neg not or popc prefetch prefetchu prmt rcp red rem ret rsqrt sad selp set setp shf shfl shl shr \
     sin slct sqrt st sub subc testp trap vote xor";

/// Instructions that came later: an instruction, modifiers that it must all have, the version that introduced them.
const INSTRUCTIONS: [(&str, &[&str], Version); 61] = [
    ("mma", &[], (6, 4)),
    ("mma", &["m16n8k8"], (6, 5)),
    ("mma", &["m8n8k16"], (6, 5)),
    ("mma", &["m16n8k16"], (7, 0)),
    ("mma", &["m16n8k32"], (7, 0)),
    ("mma", &["e4m3"], (8, 4)),
    ("mma", &["e5m2"], (8, 4)),
    ("ldmatrix", &[], (6, 5)),
    ("ldmatrix", &["m16n16"], (8, 6)),
    ("cp", &["async"], (7, 0)),
    ("cp", &["async", "mbarrier"], (7, 0)),
    ("cp", &["async", "bulk"], (8, 0)),
    ("redux", &[], (7, 0)),
    ("tanh", &[], (7, 0)),
    ("ex2", &["f16"], (7, 0)),
    ("ex2", &["f16x2"], (7, 0)),
    ("ex2", &["bf16"], (7, 8)),
    ("ex2", &["bf16x2"], (7, 8)),
    ("max", &["f16"], (7, 0)),
    ("max", &["f16x2"], (7, 0)),
    ("max", &["bf16"], (7, 0)),
    ("max", &["bf16x2"], (7, 0)),
    ("min", &["f16"], (7, 0)),
    ("min", &["f16x2"], (7, 0)),
    ("min", &["bf16"], (7, 0)),
    ("min", &["bf16x2"], (7, 0)),
    ("fma", &["bf16"], (7, 0)),
    ("fma", &["bf16x2"], (7, 0)),
    ("add", &["bf16"], (7, 8)),
    ("add", &["bf16x2"], (7, 8)),
    ("sub", &["bf16"], (7, 8)),
    ("sub", &["bf16x2"], (7, 8)),
    ("mul", &["bf16"], (7, 8)),
    ("mul", &["bf16x2"], (7, 8)),
    ("cvt", &["f16x2"], (7, 0)),
    ("cvt", &["bf16x2"], (7, 0)),
    // From bf16; to it since 7.0.
    ("cvt", &["bf16"], (7, 1)),
    ("createpolicy", &[], (7, 4)),
    ("cvta", &["param"], (7, 7)),
    ("isspacep", &["param"], (7, 7)),
    ("movmatrix", &[], (7, 8)),
    ("stmatrix", &[], (7, 8)),
    ("mapa", &[], (7, 8)),
    ("griddepcontrol", &[], (7, 8)),
    ("barrier", &["cluster"], (7, 8)),
    ("mbarrier", &[], (7, 0)),
    ("mbarrier", &["try_wait"], (7, 8)),
    ("mbarrier", &["expect_tx"], (8, 0)),
    ("fence", &[], (6, 0)),
    ("fence", &["acquire"], (8, 6)),
    ("fence", &["proxy"], (7, 5)),
    ("fence", &["proxy", "async"], (8, 0)),
    ("fence", &["mbarrier_init"], (8, 0)),
    ("elect", &[], (8, 0)),
    ("prefetch", &["tensormap"], (8, 0)),
    ("setmaxnreg", &[], (8, 0)),
    ("wgmma", &[], (8, 0)),
    ("st", &["async"], (8, 1)),
    ("red", &["async"], (8, 1)),
    ("ld", &["v8"], (8, 8)),
    ("st", &["v8"], (8, 8)),
];

/// What any instruction may be told, by the beginning of the modifier.
const MODIFIERS: [(&str, Version); 9] = [
    ("L1::", (7, 4)),
    ("L2::", (7, 4)),
    ("shared::cta", (7, 8)),
    ("shared::cluster", (8, 0)),
    ("multicast::", (8, 0)),
    ("mmio", (8, 2)),
    ("b128", (8, 3)),
    ("param::", (8, 3)),
    ("cta_group::", (8, 6)),
];

/// Directives that need no more than capability 7.5 does, and later ones.
const DIRECTIVES: &str = ".address_size .align .b8 .b16 .b32 .b64 .branchtargets .callprototype .calltargets .common .const \
     .entry .extern .file .func .global .loc .local .maxnreg .maxntid .minnctapersm .param .pragma .reg .reqntid \
     .section .shared .target .version .visible .weak";
const LATER_DIRECTIVES: [(&str, Version); 4] = [
    (".noreturn", (6, 4)),
    (".explicitcluster", (7, 8)),
    (".reqnctapercluster", (7, 8)),
    (".maxclusterrank", (7, 8)),
];

/// Special registers that came later, by the beginning of their names.
const REGISTERS: [(&str, Version); 4] =
    [("%cluster", (7, 8)), ("%ncluster", (7, 8)), ("%is_explicit_cluster", (7, 8)), ("%aggr_smem", (8, 1))];

/// Advice to the optimiser that changes no result, by the beginning of the string and the version that knows it. An older
/// assembler warns of it, and a newer one refuses it below its version: lowered texts go without.
const ADVICE: [(&str, Version); 2] = [("used_bytes_mask", (8, 3)), ("frequency", (9, 0))];

/// A text for drivers as old as its instructions allow.
pub struct Lowered {
    pub text: String,
    /// Instructions and directives that the tables above lack: the text is nvcc's own, if there are any.
    pub unknown: BTreeSet<String>,
}

/// Lowers `ptx`, for compute capability `sm` (with `exact`: `90a`), to the least version. Without `lines` it also loses
/// the source lines: the assemblers of CUDA 12.0, and so drivers of that age, crash on some of nvcc 13's.
pub fn lower(ptx: &str, sm: u32, exact: bool, lines: bool) -> Lowered {
    let kept: Vec<&str> = ptx.lines().filter(|line| lines || !is_debug(line)).collect();
    // What follows the functions is debug sections only.
    let end =
        kept.iter().position(|l| !lines && l.trim_start().starts_with(".section")).unwrap_or(kept.len());
    let kept = &kept[..end];
    let table = Table::new();
    let mut unknown = BTreeSet::new();
    let mut least = target_version(sm, exact);
    let mut known = BTreeMap::new();
    for word in kept.iter().flat_map(|line| heads(line)) {
        let version = *known.entry(word).or_insert_with(|| table.version(word));
        match version {
            Some(version) => least = least.max(version),
            None => drop(unknown.insert(word.to_owned())),
        }
    }
    for (register, version) in REGISTERS {
        if kept.iter().any(|line| line.contains(register)) {
            least = least.max(version);
        }
    }
    let mut text = String::with_capacity(ptx.len());
    for line in kept {
        if line.starts_with(".version ") && unknown.is_empty() {
            text += &format!(".version {}.{}", least.0, least.1);
        } else if !(unknown.is_empty() && advice(line).is_some_and(|version| version > least)) {
            text += line;
        } else {
            continue;
        }
        text.push('\n');
    }
    Lowered { text, unknown }
}

/// Whether a line only says where code came from.
fn is_debug(line: &str) -> bool {
    matches!(line.split_whitespace().next(), Some(".loc" | ".file"))
}

/// The version that knows the advice on this line, if it is advice.
fn advice(line: &str) -> Option<Version> {
    let said = line.trim_start().strip_prefix(".pragma \"")?;
    ADVICE.into_iter().find(|(name, _)| said.starts_with(name)).map(|(_, version)| version)
}

/// The version that first knows a compute capability.
fn target_version(sm: u32, exact: bool) -> Version {
    match (sm, exact) {
        (..=75, false) => (6, 3),
        (76..=80, false) => (7, 0),
        (81..=86, false) => (7, 1),
        (87, false) => (7, 4),
        (88..=90, false) => (7, 8),
        (..=90, true) => (8, 0),
        (91..=101, _) => (8, 6),
        _ => (8, 7),
    }
}

/// Instructions and directives that begin on a line: inline assembly may have several.
fn heads(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.split(';').filter_map(|statement| {
        let statement = statement.trim_start_matches(|c: char| c.is_whitespace() || "{}".contains(c));
        let statement = match statement.strip_prefix('@') {
            Some(guarded) => guarded.split_once(char::is_whitespace)?.1.trim_start(),
            None => statement,
        };
        let word = statement.split_whitespace().next()?;
        let of_a_name = |c: char| c.is_ascii_alphanumeric() || "._:".contains(c);
        let head =
            word.starts_with(|c: char| c.is_ascii_lowercase() || c == '.') && word.chars().all(of_a_name);
        (head && !word.ends_with(':')).then_some(word)
    })
}

struct Table {
    plain: BTreeSet<&'static str>,
    directives: BTreeSet<&'static str>,
}

impl Table {
    fn new() -> Table {
        Table {
            plain: PLAIN.split_whitespace().collect(),
            directives: DIRECTIVES.split_whitespace().collect(),
        }
    }

    /// The version that first knows an instruction with its modifiers, or a directive.
    fn version(&self, word: &str) -> Option<Version> {
        if word.starts_with('.') {
            let later = LATER_DIRECTIVES.iter().find(|(name, _)| *name == word).map(|(_, version)| *version);
            return if self.directives.contains(word) { Some((6, 3)) } else { later };
        }
        let mut parts = word.split('.');
        let name = parts.next().unwrap_or_default();
        let modifiers: Vec<&str> = parts.collect();
        let plain = self.plain.contains(name).then_some((6, 3));
        let own =
            INSTRUCTIONS.iter().filter(|(n, all, _)| *n == name && all.iter().all(|m| modifiers.contains(m)));
        let own = own.map(|(_, _, version)| *version).max();
        let told = MODIFIERS.iter().filter(|(begin, _)| modifiers.iter().any(|m| m.starts_with(begin)));
        let told = told.map(|(_, version)| *version).max();
        // Modifiers alone do not make an instruction known.
        plain.max(own).map(|version| version.max(told.unwrap_or_default()))
    }
}
