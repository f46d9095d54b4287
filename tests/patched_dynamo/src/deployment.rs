// SPDX-License-Identifier: Apache-2.0

//! Parts of a deployment that runs in this process.

use std::net::TcpListener;
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use dynamo_llm::entrypoint::input::{Input, run_input};
use dynamo_llm::entrypoint::{EngineConfig, RouterConfig};
use dynamo_llm::local_model::LocalModelBuilder;
use dynamo_runtime::discovery::EventTransportKind;
use dynamo_runtime::distributed::{DiscoveryBackend, DistributedConfig, RequestPlaneMode};
use dynamo_runtime::storage::kv::Selector;
use dynamo_runtime::{DistributedRuntime, Runtime};

/// A part of a deployment that has no services besides files of one folder.
pub async fn distributed(runtime: &Runtime, folder: &Path) -> Result<DistributedRuntime> {
    let config = DistributedConfig {
        discovery_backend: DiscoveryBackend::KvStore(Selector::File(folder.to_owned())),
        nats_config: None,
        request_plane: RequestPlaneMode::Tcp,
        response_plane: None,
        event_transport_kind: EventTransportKind::Zmq,
    };
    DistributedRuntime::new(runtime.clone(), config).await
}

/// Starts Dynamo's whole frontend in the background, on `port` of this machine.
///
/// A request may go on with another worker `migrations` times; `None` is Dynamo's default.
pub async fn serve(
    frontend: DistributedRuntime,
    router: RouterConfig,
    migrations: Option<u32>,
    port: u16,
) -> Result<()> {
    let model = LocalModelBuilder::default()
        .http_host(Some("127.0.0.1".to_owned()))
        .http_port(port)
        .router_config(Some(router))
        .migration_limit(migrations)
        .build()
        .await?;
    let engine = EngineConfig::Dynamic {
        model: Box::new(model),
        chat_engine_factory: None,
        prefill_load_estimator: None,
    };
    tokio::spawn(async move {
        if let Err(error) = run_input(frontend, Input::Http, engine).await {
            eprintln!("the frontend ended: {error:#}");
        }
    });
    Ok(())
}

/// A port that nothing listens on now, and that no other call in this process returns.
///
/// Below the range from which systems take ports on their own: the workers that start meanwhile
/// leave it to the frontend.
pub fn free_port() -> Result<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    (0..12_000)
        .map(|_| process::id().wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)))
        .map(|next| 20_000 + (next % 12_000) as u16)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .context("no free port was found from 20000 to 31999")
}
