//! The `tandem` command.

mod cli;

fn main() -> std::process::ExitCode {
    tandem::text::serve_sandbox_if_asked();
    cli::main()
}
