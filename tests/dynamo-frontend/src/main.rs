// SPDX-License-Identifier: Apache-2.0

//! Dynamo's HTTP and gRPC frontend, discovery, planes and KV router, started from the Rust crates.
//!
//! It stands in for `python -m dynamo.frontend`: the Rust side of Dynamo's Python bindings is on
//! no registry, so a patched router can be run only from a program of this kind.

mod config;
mod options;
mod unsupported;
mod values;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dynamo_kv_router::plugins::RouterPluginRegistry;
use dynamo_llm::entrypoint::EngineConfig;
use dynamo_llm::entrypoint::input::{Input, run_input};
use dynamo_llm::kv_router::plugins::install_router_plugin_registry;
use dynamo_llm::local_model::LocalModelBuilder;
use dynamo_runtime::distributed::DistributedConfig;
use dynamo_runtime::{DistributedRuntime, Runtime, logging};
use tokio::signal::unix::{SignalKind, signal};

use config::DecodeOverlap;
use options::{Options, Stop};

fn main() -> ExitCode {
    let Prepared {
        options,
        model,
        policies,
        overlap,
    } = match prepare() {
        Ok(prepared) => prepared,
        Err(Stop::Show(text)) => {
            let _ = text.print();
            return ExitCode::SUCCESS;
        }
        Err(Stop::Refuse(reason)) => {
            eprintln!("error: {reason}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = settle(&config::environment(&options)) {
        eprintln!("error: cannot start again with Dynamo's variables: {error}");
        return ExitCode::FAILURE;
    }
    logging::init();
    tracing::info!(
        router_mode = ?config::effective_mode(&options),
        decode_overlap_score_weight = overlap.weight,
        source = overlap.source,
        "Frontend starts"
    );
    raise_file_limit();
    let ignored = unsupported::warnings(|name| std::env::var_os(name));
    for warning in config::warnings(&options).into_iter().chain(ignored) {
        tracing::warn!("{warning}");
    }
    install_router_plugin_registry(policies);
    let input = if options.api_switches.kserve_grpc_server() {
        Input::Grpc
    } else {
        Input::Http
    };
    match start(&options, model, input) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What the options and the policy file ask for, checked.
struct Prepared {
    options: Options,
    model: LocalModelBuilder,
    policies: RouterPluginRegistry,
    overlap: DecodeOverlap,
}

fn prepare() -> Result<Prepared, Stop> {
    let options = options::parse(std::env::args_os())?;
    Ok(Prepared {
        model: config::local_model(&options).map_err(Stop::Refuse)?,
        policies: config::policies(&options).map_err(Stop::Refuse)?,
        overlap: config::decode_overlap(&options).map_err(Stop::Refuse)?,
        options,
    })
}

/// Raises the soft limit of open files as Python's frontend does: each connection takes one.
fn raise_file_limit() {
    let target = match std::env::var("DYN_FRONTEND_FD_LIMIT_TARGET") {
        Ok(text) => text.parse().unwrap_or(0),
        Err(_) => 8192,
    };
    let Ok((soft, _)) = rlimit::Resource::NOFILE.get() else {
        return;
    };
    if soft < target {
        match rlimit::increase_nofile_limit(target) {
            Ok(raised) => tracing::info!(from = soft, to = raised, "Limit of open files raised"),
            Err(error) => tracing::warn!(%error, "The limit of open files stays at {soft}"),
        }
    }
}

/// Starts this program again with the variables that Dynamo takes from the environment alone,
/// unless they stand so already: a program cannot safely change its own.
///
/// Returns only if there is nothing to change, or with the error that prevented the start.
fn settle(variables: &[(&'static str, Option<OsString>)]) -> std::io::Result<()> {
    if variables
        .iter()
        .all(|(name, value)| std::env::var_os(name) == *value)
    {
        return Ok(());
    }
    let mut again = Command::new(std::env::current_exe()?);
    again.args(std::env::args_os().skip(1));
    for (name, value) in variables {
        match value {
            Some(value) => again.env(name, value),
            None => again.env_remove(name),
        };
    }
    Err(again.exec())
}

fn start(options: &Options, model: LocalModelBuilder, input: Input) -> anyhow::Result<()> {
    let planes = config::distributed(&options.planes)?;
    let runtime = Runtime::from_settings()?;
    runtime
        .primary()
        .block_on(serve(runtime.clone(), planes, model, input))
}

async fn serve(
    runtime: Runtime,
    planes: DistributedConfig,
    mut model: LocalModelBuilder,
    input: Input,
) -> anyhow::Result<()> {
    // Not `runtime.is_shutting_down()`: Dynamo shuts down after an error as well.
    let asked_to_stop = Arc::new(AtomicBool::new(false));
    tokio::spawn(stop_on_signal(runtime.clone(), asked_to_stop.clone()));
    let served = async {
        let distributed = DistributedRuntime::new(runtime.clone(), planes).await?;
        let engine = EngineConfig::Dynamic {
            model: Box::new(model.build().await?),
            chat_engine_factory: None,
            prefill_load_estimator: None,
        };
        run_input(distributed, input, engine).await
    };
    match served.await {
        // A signal during start-up is an error to Dynamo, and what the user asked for.
        Err(error) if asked_to_stop.load(Ordering::Relaxed) => {
            tracing::info!(%error, "stopped during start-up");
            Ok(())
        }
        result => result,
    }
}

/// Ends the runtime at the first SIGINT or SIGTERM and the program at the second.
async fn stop_on_signal(runtime: Runtime, asked_to_stop: Arc<AtomicBool>) {
    let (Ok(mut interrupt), Ok(mut terminate)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
    ) else {
        tracing::warn!("cannot listen for signals; the program ends at once when asked to stop");
        return;
    };
    let mut next = async || {
        tokio::select! {
            _ = interrupt.recv() => 130,
            _ = terminate.recv() => 143,
        }
    };
    next().await;
    asked_to_stop.store(true, Ordering::Relaxed);
    runtime.shutdown();
    let code = next().await;
    std::process::exit(code);
}
