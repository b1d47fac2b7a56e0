//! The `tandem` command.

mod cli;

fn main() -> std::process::ExitCode {
    tandem::atomic_file::report_size_limits();
    tandem::text::serve_sandbox_if_asked();
    cli::main()
}
