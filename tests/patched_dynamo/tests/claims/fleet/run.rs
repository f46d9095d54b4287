// SPDX-License-Identifier: Apache-2.0

//! Two runtimes: the workers' one, which all tests share, and one for each test.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::runtime::{Builder, Handle, Runtime};
use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;

use super::trace::Trace;

/// Longer than anything here takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
const THREADS: usize = 2;

/// Dynamo has one server for the requests of all workers in a process. It runs where its first
/// worker was started, hence on a runtime that ends with the process.
static WORKERS: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("workers")
        .enable_all()
        .build()
        .expect("the workers' runtime starts")
});

/// The runtime of all workers.
pub(crate) fn workers() -> Handle {
    WORKERS.handle().clone()
}

/// Runs a test on a runtime of its own, whose spans and log lines are kept apart from others'.
pub(crate) fn run(test: impl AsyncFnOnce(Trace) -> Result<()>) -> Result<()> {
    let trace = Trace::default();
    let subscriber = tracing_subscriber::registry()
        .with(LevelFilter::DEBUG)
        .with(trace.clone());
    let dispatch = Dispatch::new(subscriber);
    let of_thread = dispatch.clone();
    let runtime = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .on_thread_start(move || {
            // For as long as the thread lives.
            std::mem::forget(tracing::dispatcher::set_default(&of_thread));
        })
        .build()?;
    let result =
        tracing::dispatcher::with_default(&dispatch, || runtime.block_on(test(trace.clone())));
    runtime.shutdown_background();
    result.map_err(|error| error.context(format!("the router's last lines:\n{}", trace.tail())))
}

/// Looks until `found` has something, which it returns. `otherwise` says what was there instead.
pub(crate) async fn until<T>(
    what: &str,
    mut found: impl AsyncFnMut() -> Result<std::result::Result<T, String>>,
) -> Result<T> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let otherwise = match found().await? {
            Ok(found) => return Ok(found),
            Err(otherwise) => otherwise,
        };
        if Instant::now() > deadline {
            bail!("not within {LIMIT:?}: {what}; instead: {otherwise}");
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}
