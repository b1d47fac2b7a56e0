//! Many requests on the command line: `generate --prompts` and `bench --trace`.

mod prompts;
mod trace;
