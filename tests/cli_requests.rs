//! Many requests on the command line: `generate --prompts` and `bench --trace`.

#[path = "cli_requests/prompts.rs"]
mod prompts;
mod support;
#[path = "cli_requests/trace.rs"]
mod trace;
