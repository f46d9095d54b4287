// SPDX-License-Identifier: Apache-2.0

//! Signals that ask the command to end. Whoever waits looks here, and ends what it started.

use std::path::Path;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::signal::unix::{SignalKind, signal};

use crate::cache::Cache;
use crate::progress::say;

static ASKED: OnceLock<&'static str> = OnceLock::new();

/// Listens from now on. A second signal ends the command at once.
pub(crate) fn listen() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut signals = runtime.block_on(async {
        Ok::<_, std::io::Error>((
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ))
    })?;
    thread::spawn(move || {
        runtime.block_on(async {
            loop {
                let name = tokio::select! {
                    _ = signals.0.recv() => "interrupted",
                    _ = signals.1.recv() => "terminated",
                    _ = signals.2.recv() => "the terminal was closed",
                };
                if ASKED.set(name).is_err() {
                    std::process::exit(130);
                }
            }
        });
    });
    Ok(())
}

/// An error once a signal has come.
pub(crate) fn check() -> Result<()> {
    if let Some(name) = ASKED.get() {
        bail!("{name}; everything that was started is stopped");
    }
    Ok(())
}

/// Runs `scenarios` in a folder of the cache's runs, until it ends or a signal comes. The folder, with the
/// logs, is kept if it failed.
pub(crate) fn run(
    cache: &Cache,
    name: &str,
    scenarios: impl AsyncFnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix(&format!("{name}-"))
        .tempdir_in(cache.folder("runs")?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        tokio::select! {
            result = scenarios(folder.path()) => result,
            error = asked() => Err(error),
        }
    });
    if result.is_err() {
        say(format!("logs are kept in {}", folder.keep().display()));
    }
    result
}

/// Waits for a signal.
pub(crate) async fn asked() -> anyhow::Error {
    loop {
        if let Err(error) = check() {
            return error;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
