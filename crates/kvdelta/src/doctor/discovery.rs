// SPDX-License-Identifier: Apache-2.0

//! Discovery records of Dynamo 1.6.1, whatever store they come from, read into facts.
//!
//! The records are `DiscoveryInstance` of `dynamo-runtime` (`src/discovery/mod.rs`), the cards
//! `ModelDeploymentCard` of `dynamo-llm` (`src/model_card.rs`). Unknown fields are ignored: other
//! releases write other ones.

use std::collections::{BTreeMap, BTreeSet};

use kvdelta_indexer::BlockSize;
use kvdelta_protocol::{CAPABILITY_KEY, Capability, NoCapability};
use serde::Deserialize;
use serde_json::Value;

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
        scope: Option<Scope>,
        publisher_id: Option<u64>,
        #[serde(default)]
        metadata: SourceMetadata,
    },
    EventChannel {
        topic: String,
        instance_id: Option<u64>,
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
    config: Option<TransportConfig>,
}

#[derive(Debug, Deserialize)]
struct TransportConfig {
    endpoint: Option<String>,
}

/// Whose events: those of an endpoint are in it, those of a component stand beside.
#[derive(Debug, Deserialize)]
struct Scope {
    endpoint: Option<ScopeNames>,
    #[serde(flatten)]
    names: ScopeNames,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct ScopeNames {
    component: Option<String>,
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
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Fields that name files of the model. The frontend fetches them from the worker's system port.
const FILES: [&str; 5] = [
    "model_info",
    "tokenizer",
    "prompt_formatter",
    "chat_template_file",
    "gen_config",
];
/// Further fields that a frontend compares (`mdcsum` of `model_card.rs`).
const COMPARED: [&str; 4] = ["source_path", "context_length", "needs", "aliases"];

#[derive(Debug, Deserialize)]
struct Lora {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
struct RuntimeConfig {
    /// As wide as Dynamo's, so that sums over workers fit.
    data_parallel_size: Option<u32>,
    kv_event_publishing_enabled: Option<bool>,
    kv_event_source_mode: Option<String>,
    enable_local_indexer: Option<bool>,
    /// What the engine's worker adds, by name.
    #[serde(default)]
    runtime_data: Value,
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
            Record::EventSource {
                topic, metadata, ..
            } if topic == "kv-events" => {
                if let Some(RankId { worker_id, dp_rank }) = metadata.worker {
                    sources.entry(worker_id).or_default().insert(dp_rank);
                }
            }
            Record::EventChannel {
                topic, transport, ..
            } if topic == "kv-events" => {
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

/// Who publishes the KV events of a rank, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Publisher {
    pub(crate) id: u64,
    pub(crate) component: Option<String>,
    pub(crate) worker_id: u64,
    pub(crate) dp_rank: u32,
    /// The kind of its transport (`Zmq`, `ZmqBroker`, `Nats`); `None`: not registered.
    pub(crate) transport: Option<String>,
    /// Where it publishes, if not by a broker.
    pub(crate) endpoint: Option<String>,
}

/// The publishers of KV events among the records, by worker and rank.
pub(crate) fn publishers(entries: &[Entry]) -> Vec<Publisher> {
    let mut channels = BTreeMap::new();
    let mut publishers = Vec::new();
    for entry in entries {
        if entry.age_seconds.is_some_and(|age| age > STALE_SECONDS) {
            continue;
        }
        match serde_json::from_slice(&entry.value) {
            Ok(Record::EventSource {
                topic,
                scope,
                publisher_id: Some(id),
                metadata: SourceMetadata { worker: Some(rank) },
            }) if topic == "kv-events" => {
                let Ok(dp_rank) = u32::try_from(rank.dp_rank) else {
                    continue;
                };
                publishers.push(Publisher {
                    id,
                    component: scope
                        .and_then(|scope| scope.endpoint.unwrap_or(scope.names).component),
                    worker_id: rank.worker_id,
                    dp_rank,
                    transport: None,
                    endpoint: None,
                });
            }
            Ok(Record::EventChannel {
                topic,
                instance_id: Some(id),
                transport,
            }) if topic == "kv-events" => {
                channels.insert(id, transport);
            }
            _ => {}
        }
    }
    for publisher in &mut publishers {
        if let Some(transport) = channels.remove(&publisher.id) {
            publisher.transport = Some(transport.kind);
            publisher.endpoint = transport.config.and_then(|config| config.endpoint);
        }
    }
    publishers.sort_by_key(|publisher| (publisher.worker_id, publisher.dp_rank, publisher.id));
    publishers
}

fn no_claims(runtime_data: &Value, block_size_tokens: Option<u64>) -> Option<NoCapability> {
    let said = runtime_data.get(CAPABILITY_KEY);
    let Some(capability) = said.and_then(|said| Capability::deserialize(said).ok()) else {
        return Some(NoCapability::NotAdvertised);
    };
    let own = block_size_tokens.and_then(|tokens| u32::try_from(tokens).ok());
    let own = own.and_then(|tokens| BlockSize::try_from(tokens).ok());
    capability.check(own.unwrap_or(capability.block_size)).err()
}

fn is_any_or(wanted: &Option<String>, value: &str) -> bool {
    wanted.as_ref().is_none_or(|wanted| wanted == value)
}

fn worker(namespace: String, component: String, instance_id: u64, card: Card, key: &str) -> Worker {
    let system_url = FILES
        .iter()
        .filter_map(|name| card.others.get(*name))
        .find_map(system_url);
    let compared = compared(&card);
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
        no_claims: no_claims(&runtime.runtime_data, kv_cache_block_size),
        namespace,
        component,
        instance_id,
        model: display_name,
        card: key.to_owned(),
        role: worker_type.as_deref().and_then(Role::parse),
        block_size_tokens: kv_cache_block_size,
        data_parallel_ranks: runtime.data_parallel_size.map_or(1, u64::from),
        publishes_events: runtime.kv_event_publishing_enabled,
        event_source_mode: runtime.kv_event_source_mode,
        local_indexer: runtime.enable_local_indexer,
        router: router_config.map(card_router),
        required_domain,
        compared,
        system_url,
        ..Worker::default()
    }
}

fn compared(card: &Card) -> BTreeMap<String, String> {
    let files = FILES.iter().filter_map(|name| {
        let mut checksums = Vec::new();
        collect_checksums(card.others.get(*name)?, &mut checksums);
        Some(((*name).to_owned(), checksums.join(" ")))
    });
    let others = COMPARED
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), card.others.get(*name)?.to_string())));
    let router = card.router_config.as_ref().map(|router| {
        let text = format!("{router:?}");
        ("router_config".to_owned(), text)
    });
    files.chain(others).chain(router).collect()
}

fn collect_checksums(file: &Value, checksums: &mut Vec<String>) {
    if let Value::Object(fields) = file {
        for (name, value) in fields {
            match value {
                Value::String(text) if name == "checksum" => checksums.push(text.clone()),
                value => collect_checksums(value, checksums),
            }
        }
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
fn system_url(file: &Value) -> Option<String> {
    match file {
        Value::String(text) => {
            let (server, _) = text.split_once("/v1/metadata/")?;
            server.contains("://").then(|| server.to_owned())
        }
        Value::Object(fields) => fields.values().find_map(system_url),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(key: &str, value: Value) -> Entry {
        Entry {
            key: key.to_owned(),
            value: value.to_string().into_bytes(),
            age_seconds: None,
        }
    }

    fn card(id: u64, card: Value) -> Entry {
        entry(
            &format!("v1/mdc/{id}"),
            json!({
                "type": "Model", "namespace": "dynamo", "component": "backend",
                "endpoint": "generate", "instance_id": id, "card_json": card,
            }),
        )
    }

    #[test]
    fn a_card_is_read_with_all_that_bears_on_the_flag() {
        let entries = [
            card(
                5,
                json!({
                    "display_name": "model", "worker_type": "decode", "kv_cache_block_size": 16,
                    "context_length": 8192,
                    "tokenizer": {"hf_tokenizer_json": {
                        "path": "http://10.0.0.1:8081/v1/metadata/a/tokenizer.json",
                        "checksum": "blake3:1",
                    }},
                    "runtime_config": {
                        "data_parallel_size": 2, "kv_event_publishing_enabled": true,
                        "enable_local_indexer": false, "kv_event_source_mode": "state_agent_v2",
                        "topology_domains": {"zone": "a"}, "kv_transfer_domain": "zone",
                        "kv_transfer_enforcement": "required",
                    },
                    "router_config": {"router_mode": "k_v", "kv_router_config": {
                        "decode_overlap_score_weight": 2.5, "use_kv_events": true,
                    }},
                }),
            ),
            card(
                5,
                json!({"display_name": "adapter", "worker_type": "decode", "lora": {"name": "adapter"}}),
            ),
            entry(
                "v1/event_sources/1",
                json!({
                    "type": "EventSource", "topic": "kv-events", "publisher_id": 1,
                    "metadata": {"worker": {"worker_id": 5, "dp_rank": 1}},
                }),
            ),
            entry(
                "v1/event_channels/1",
                json!({
                    "type": "EventChannel", "topic": "kv-events", "instance_id": 1,
                    "transport": {"kind": "Nats", "config": {"subject_prefix": "a"}},
                }),
            ),
        ];
        let deployment = deployment(&entries, &Wanted::default());
        assert_eq!(deployment.event_planes, BTreeSet::from(["Nats".to_owned()]));
        let [worker] = &deployment.workers[..] else {
            panic!("{:?}", deployment.workers);
        };
        assert_eq!(worker.name(), "decode worker dynamo/backend/5");
        assert_eq!(worker.block_size_tokens, Some(16));
        assert_eq!(worker.data_parallel_ranks, 2);
        assert_eq!(worker.publishes_events, Some(true));
        assert_eq!(worker.local_indexer, Some(false));
        assert_eq!(worker.event_source_mode.as_deref(), Some("state_agent_v2"));
        assert_eq!(worker.event_source_ranks, BTreeSet::from([1]));
        assert_eq!(worker.required_domain.as_deref(), Some("zone=a"));
        assert_eq!(worker.adapters, BTreeSet::from(["adapter".to_owned()]));
        assert_eq!(worker.system_url.as_deref(), Some("http://10.0.0.1:8081"));
        assert_eq!(worker.compared["tokenizer"], "blake3:1");
        assert_eq!(worker.compared["context_length"], "8192");
        let router = worker.router.as_ref().unwrap();
        assert_eq!(router.mode.as_deref(), Some("kv"));
        assert_eq!(router.weight, Some(2.5));
        assert_eq!(router.use_kv_events, Some(true));
    }

    #[test]
    fn what_an_old_card_lacks_is_not_known() {
        let deployment = deployment(
            &[card(1, json!({"display_name": "model"}))],
            &Wanted::default(),
        );
        let worker = &deployment.workers[0];
        assert_eq!(worker.role, None);
        assert_eq!(worker.publishes_events, None);
        assert_eq!(worker.block_size_tokens, None);
        assert_eq!(worker.local_indexer, None);
        assert_eq!(worker.system_url, None);
    }

    #[test]
    fn a_capability_says_whether_claims_are_made() {
        let whole = json!({
            "version": 1, "block_size": 32, "prefix_caching": true, "cache_groups": ["full_attention"],
        });
        let with = |key: &str, value: Value| {
            let mut said = whole.clone();
            said[key] = value;
            json!({CAPABILITY_KEY: said})
        };
        for (runtime_data, expected) in [
            (json!({CAPABILITY_KEY: whole}), None),
            (Value::Null, Some("not_advertised")),
            (json!({"other": 1}), Some("not_advertised")),
            (with("version", json!("1")), Some("not_advertised")),
            (with("version", json!(0)), Some("version")),
            (with("block_size", json!(16)), Some("block_size")),
            (with("cache_groups", json!(["mamba"])), Some("cache_groups")),
        ] {
            let fields = json!({
                "display_name": "m", "kv_cache_block_size": 32,
                "runtime_config": {"runtime_data": runtime_data},
            });
            let deployment = deployment(&[card(1, fields)], &Wanted::default());
            let no_claims = deployment.workers[0].no_claims;
            let label = no_claims.map(NoCapability::as_label);
            assert_eq!(label, expected, "{runtime_data}");
        }
    }

    #[test]
    fn others_are_left_out_and_remembered() {
        let entries = [card(1, json!({"display_name": "model"}))];
        let wanted = Wanted {
            namespace: None,
            model: Some("other".to_owned()),
        };
        let deployment = deployment(&entries, &wanted);
        assert!(deployment.workers.is_empty());
        assert_eq!(
            deployment.left_out,
            BTreeSet::from(["dynamo/model".to_owned()])
        );
    }

    #[test]
    fn records_out_of_shape_are_broken_and_do_not_end_the_reading() {
        let entries = [
            entry("v1/mdc/a", json!([1])),
            entry("v1/mdc/b", json!({"type": "Model"})),
            card(1, json!({"display_name": 5})),
            card(2, json!({"display_name": "model"})),
        ];
        let deployment = deployment(&entries, &Wanted::default());
        assert_eq!(deployment.broken_entries.len(), 3);
        assert_eq!(deployment.workers.len(), 1);
    }
    #[test]
    fn ranks_beyond_dynamos_number_are_a_broken_record() {
        let sized = |id, size: u64| {
            let runtime = json!({"data_parallel_size": size});
            let fields =
                json!({"display_name": "m", "worker_type": "decode", "runtime_config": runtime});
            card(id, fields)
        };
        let most = u64::from(u32::MAX);
        let entries = [
            sized(1, u64::MAX),
            sized(2, most + 1),
            sized(3, most),
            sized(4, most),
        ];
        let deployment = deployment(&entries, &Wanted::default());
        assert_eq!(deployment.broken_entries.len(), 2);
        assert!(
            deployment.broken_entries[0]
                .1
                .contains("18446744073709551615")
        );
        assert_eq!(deployment.workers.len(), 2);
        crate::doctor::check::doctor(&deployment);
    }
}
