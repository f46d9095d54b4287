// SPDX-License-Identifier: Apache-2.0

//! Discovery records of Dynamo 1.6.1, whatever store they come from, read into facts.
//!
//! The records are `DiscoveryInstance` of `dynamo-runtime` (`src/discovery/mod.rs`), the cards
//! `ModelDeploymentCard` of `dynamo-llm` (`src/model_card.rs`). Unknown fields are ignored: other
//! releases write other ones.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::facts::{CardRouter, Deployment, Role, Worker};

/// The parts of the store that are read, as `discovery/kv_store.rs` names them.
pub(crate) const BUCKETS: [&str; 3] = ["v1/mdc", "v1/event_sources", "v1/event_channels"];

/// One record of the store.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Key, or path of the file.
    pub(crate) key: String,
    pub(crate) value: Vec<u8>,
    /// Seconds since its owner last touched it; `None` where the store expires records itself.
    pub(crate) age_seconds: Option<u64>,
}

/// The file back end removes a record after 10 s without a touch, if any process is left to do it.
const STALE_SECONDS: u64 = 30;

#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
enum Record {
    Model {
        namespace: String,
        component: String,
        instance_id: u64,
        card_json: Box<Card>,
    },
    EventSource {
        topic: String,
        #[serde(default)]
        metadata: SourceMetadata,
    },
    EventChannel {
        topic: String,
        transport: Transport,
    },
    #[serde(other)]
    Other,
}

#[derive(Debug, Default, Deserialize)]
struct SourceMetadata {
    worker: Option<RankId>,
}

#[derive(Debug, Deserialize)]
struct RankId {
    worker_id: u64,
    #[serde(default)]
    dp_rank: u64,
}

#[derive(Debug, Deserialize)]
struct Transport {
    kind: String,
}

#[derive(Debug, Deserialize)]
struct Card {
    display_name: String,
    kv_cache_block_size: Option<u64>,
    worker_type: Option<String>,
    lora: Option<Lora>,
    #[serde(default)]
    runtime_config: RuntimeConfig,
    router_config: Option<RouterConfig>,
    /// Where the frontend fetches files of the model: from the worker's system port.
    model_info: Option<serde_json::Value>,
    tokenizer: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
struct Lora {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
struct RuntimeConfig {
    data_parallel_size: Option<u64>,
    kv_event_publishing_enabled: Option<bool>,
    kv_event_source_mode: Option<String>,
    enable_local_indexer: Option<bool>,
    #[serde(default)]
    topology_domains: BTreeMap<String, String>,
    kv_transfer_domain: Option<String>,
    kv_transfer_enforcement: Option<String>,
}

#[derive(Debug, Deserialize)]
struct RouterConfig {
    router_mode: Option<String>,
    #[serde(default)]
    kv_router_config: KvRouterConfig,
}

#[derive(Debug, Default, Deserialize)]
struct KvRouterConfig {
    decode_overlap_score_weight: Option<f64>,
    use_kv_events: Option<bool>,
    conditional_disagg_enabled: Option<bool>,
}

/// Only these, if given.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    pub(crate) namespace: Option<String>,
    pub(crate) model: Option<String>,
}

/// Reads the records of a store into facts.
pub(crate) fn deployment(entries: &[Entry], wanted: &Wanted) -> Deployment {
    let mut deployment = Deployment::default();
    let mut adapters: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    let mut sources: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    for entry in entries {
        if let Some(age) = entry.age_seconds.filter(|age| *age > STALE_SECONDS) {
            deployment.stale_entries.push((entry.key.clone(), age));
            continue;
        }
        let record = match serde_json::from_slice(&entry.value) {
            Ok(record) => record,
            Err(error) => {
                let reason = error.to_string();
                deployment.broken_entries.push((entry.key.clone(), reason));
                continue;
            }
        };
        match record {
            Record::Model {
                namespace,
                component,
                instance_id,
                card_json: card,
            } => {
                if let Some(lora) = card.lora {
                    adapters.entry(instance_id).or_default().insert(lora.name);
                    continue;
                }
                let worker = worker(namespace, component, instance_id, *card, &entry.key);
                let is_wanted = is_any_or(&wanted.namespace, &worker.namespace)
                    && is_any_or(&wanted.model, &worker.model);
                if is_wanted {
                    deployment.workers.push(worker);
                } else {
                    let name = format!("{}/{}", worker.namespace, worker.model);
                    deployment.left_out.insert(name);
                }
            }
            Record::EventSource { topic, metadata } if topic == "kv-events" => {
                if let Some(RankId { worker_id, dp_rank }) = metadata.worker {
                    sources.entry(worker_id).or_default().insert(dp_rank);
                }
            }
            Record::EventChannel { topic, transport } if topic == "kv-events" => {
                deployment.event_planes.insert(transport.kind);
            }
            Record::EventSource { .. } | Record::EventChannel { .. } | Record::Other => {}
        }
    }
    for worker in &mut deployment.workers {
        worker.adapters = adapters.remove(&worker.instance_id).unwrap_or_default();
        worker.event_source_ranks = sources.remove(&worker.instance_id).unwrap_or_default();
    }
    deployment
}

fn is_any_or(wanted: &Option<String>, value: &str) -> bool {
    wanted.as_ref().is_none_or(|wanted| wanted == value)
}

fn worker(namespace: String, component: String, instance_id: u64, card: Card, key: &str) -> Worker {
    let system_url = [&card.model_info, &card.tokenizer]
        .into_iter()
        .flatten()
        .find_map(system_url);
    let Card {
        display_name,
        kv_cache_block_size,
        worker_type,
        runtime_config: runtime,
        router_config,
        ..
    } = card;
    let required_domain = runtime
        .kv_transfer_domain
        .filter(|_| runtime.kv_transfer_enforcement.as_deref() == Some("required"))
        .map(|domain| {
            let value = runtime.topology_domains.get(&domain);
            format!("{domain}={}", value.map_or("", String::as_str))
        });
    Worker {
        namespace,
        component,
        instance_id,
        model: display_name,
        card: key.to_owned(),
        role: worker_type.as_deref().and_then(Role::parse),
        block_size_tokens: kv_cache_block_size,
        data_parallel_ranks: runtime.data_parallel_size.unwrap_or(1),
        publishes_events: runtime.kv_event_publishing_enabled,
        event_source_mode: runtime.kv_event_source_mode,
        local_indexer: runtime.enable_local_indexer,
        router: router_config.map(card_router),
        required_domain,
        system_url,
        ..Worker::default()
    }
}

fn card_router(config: RouterConfig) -> CardRouter {
    CardRouter {
        // serde writes the variant KV as `k_v`.
        mode: config
            .router_mode
            .map(|mode| mode.replace('_', "").to_lowercase()),
        weight: config.kv_router_config.decode_overlap_score_weight,
        use_kv_events: config.kv_router_config.use_kv_events,
        conditional_disagg: config.kv_router_config.conditional_disagg_enabled,
    }
}

/// The server of the first path that is a URL to a worker's system port.
fn system_url(file: &serde_json::Value) -> Option<String> {
    match file {
        serde_json::Value::String(text) => {
            let (server, _) = text.split_once("/v1/metadata/")?;
            server.contains("://").then(|| server.to_owned())
        }
        serde_json::Value::Object(fields) => fields.values().find_map(system_url),
        _ => None,
    }
}
