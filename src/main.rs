//! The `tandem` command.

mod cli;

fn main() -> std::process::ExitCode {
    tandem::text::sandbox::serve_if_asked();
    cli::main()
}
