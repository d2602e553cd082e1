//! The laboratory of a development build.

pub(crate) use tierbed_bench::generated_log::GeneratedLog;
use tierbed_cache::bounds::Requests;
pub(crate) use tierbed_compare::register_stores;
use tierbed_core::Result;

/// Serves the commands of `tierbed bench training` on standard input until it ends.
pub(crate) fn serve_training() -> Result<()> {
    tierbed_bench::training::serve(std::io::stdin().lock(), std::io::stdout().lock())
}

/// Carries out one command of `tierbed bench lookup --log`; JSON objects.
pub(crate) fn look_up(command: &str) -> Result<String> {
    Ok(tierbed_bench::lookup::serve(command)?.to_string())
}

/// Sends requests to a simulated SSD; options and result are JSON.
pub(crate) fn replay_ssd(requests: &Requests<'_>, options: &str) -> Result<String> {
    Ok(tierbed_bench::ssd::replay(requests, options)?.to_string())
}
