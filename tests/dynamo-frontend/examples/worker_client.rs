// SPDX-License-Identifier: Apache-2.0

//! Asks the workers of a Dynamo deployment by its own client, for tests: one JSON command a line on the
//! standard input, one JSON answer a line on the standard output.
//!
//! ```text
//! "ready"                                                       -> {"ok": null}, once connected
//! "sources"                                                     -> {"ok": [{KvEventSource}, ...]}
//! {"local": {"worker": W, "rank": R, "from": null}}              -> {"ok": "msgpack in hexadecimal"}
//! {"call": {"worker": W, "endpoint": "generate", "request": {}}} -> {"ok": [{...}, ...]}
//! ```

#![allow(missing_docs, reason = "a program")]

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use dynamo_kv_router::indexer::{WorkerKvQueryKind, WorkerKvQueryRequest, WorkerKvQueryResponse};
use dynamo_llm::discovery::kv_source_membership::KvEventSource;
use dynamo_runtime::component::Instance;
use dynamo_runtime::discovery::{DiscoveryInstance, DiscoveryQuery, EventSourceQuery};
use dynamo_runtime::pipeline::{
    AddressedPushRouter, AddressedRequest, AsyncEngine, ManyOut, SingleIn,
};
use dynamo_runtime::protocols::annotated::Annotated;
use dynamo_runtime::stream::StreamExt;
use dynamo_runtime::{DistributedRuntime, Runtime};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ask {
    Ready,
    Sources,
    Local {
        worker: u64,
        rank: u32,
        from: Option<u64>,
    },
    Call {
        worker: u64,
        endpoint: String,
        request: Value,
    },
}

struct Workers {
    distributed: DistributedRuntime,
    client: Arc<AddressedPushRouter>,
}

fn main() -> Result<()> {
    let runtime = Runtime::from_settings()?;
    runtime.primary().block_on(serve(runtime.clone()))
}

async fn serve(runtime: Runtime) -> Result<()> {
    let distributed = DistributedRuntime::from_settings(runtime).await?;
    let client = AddressedPushRouter::from_runtime_provider(&distributed).await?;
    let workers = Workers {
        distributed,
        client,
    };
    let (to, mut lines) = tokio::sync::mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if to.blocking_send(line).is_err() {
                return;
            }
        }
    });
    while let Some(line) = lines.recv().await {
        let answer = match workers.answer(&line).await {
            Ok(answer) => json!({ "ok": answer }),
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        println!("{answer}");
    }
    Ok(())
}

impl Workers {
    async fn answer(&self, line: &str) -> Result<Value> {
        match serde_json::from_str(line).context("no command")? {
            Ask::Ready => Ok(Value::Null),
            Ask::Sources => Ok(serde_json::to_value(self.sources().await?)?),
            Ask::Local { worker, rank, from } => self.local(worker, rank, from).await,
            Ask::Call {
                worker,
                endpoint,
                request,
            } => self.call(worker, &endpoint, request).await,
        }
    }

    async fn sources(&self) -> Result<Vec<KvEventSource>> {
        let query = DiscoveryQuery::EventSources(EventSourceQuery::all());
        let found = self.distributed.discovery().list(query).await?;
        let mut sources = Vec::new();
        for instance in found {
            if let DiscoveryInstance::EventSource { metadata, .. } = instance {
                sources.push(serde_json::from_value(metadata)?);
            }
        }
        Ok(sources)
    }

    /// What the router asks when it recovers (`dynamo-llm`, `worker_query_transport.rs`).
    async fn local(&self, worker: u64, rank: u32, from: Option<u64>) -> Result<Value> {
        let sources = self.sources().await?;
        let source = sources
            .into_iter()
            .find(|source| source.worker.worker_id == worker && source.worker.dp_rank == rank);
        let target = source.and_then(|source| source.recovery_target);
        let target = target.context("this rank has no local indexer")?;
        let request = WorkerKvQueryRequest {
            worker_id: worker,
            dp_rank: rank,
            start_event_id: from,
            end_event_id: None,
            supports_tree_dump_failed: true,
            kind: WorkerKvQueryKind::Recovery,
        };
        let request =
            SingleIn::new(request).map(|request| AddressedRequest::for_instance(request, target));
        let mut answers: ManyOut<WorkerKvQueryResponse> = self.client.generate(request).await?;
        let answer = answers.next().await.context("no answer")?;
        let bytes = rmp_serde::to_vec_named(&answer)?;
        let digits: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Value::String(digits.concat()))
    }

    async fn call(&self, worker: u64, endpoint: &str, request: Value) -> Result<Value> {
        let found = self
            .distributed
            .discovery()
            .list(DiscoveryQuery::AllEndpoints)
            .await?;
        let mut instances = found.into_iter().filter_map(|instance| match instance {
            DiscoveryInstance::Endpoint(instance) => Some(instance),
            _ => None,
        });
        let is_it =
            |instance: &Instance| instance.instance_id == worker && instance.endpoint == endpoint;
        let Some(target) = instances.find(is_it) else {
            bail!("worker {worker} has no endpoint {endpoint}");
        };
        let request =
            SingleIn::new(request).map(|request| AddressedRequest::for_instance(request, target));
        let mut answers: ManyOut<Annotated<Value>> = self.client.generate(request).await?;
        let mut all = Vec::new();
        while let Some(answer) = answers.next().await {
            all.push(serde_json::to_value(answer)?);
        }
        Ok(Value::Array(all))
    }
}
