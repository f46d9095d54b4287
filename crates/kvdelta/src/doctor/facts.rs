// SPDX-License-Identifier: Apache-2.0

//! What is known of a deployment. `None` is "not known", never a default.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use kvdelta_protocol::NoCapability;

/// A deployment as its discovery, frontends and workers show it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Deployment {
    /// Where discovery was read.
    pub(crate) discovery: String,
    /// Why it could not be read.
    pub(crate) discovery_error: Option<String>,
    /// Entries that cannot be understood: where, and why.
    pub(crate) broken_entries: Vec<(String, String)>,
    /// Entries of the file back end that no process keeps alive: where, and their age.
    pub(crate) stale_entries: Vec<(String, u64)>,
    /// Base models; adapters stand in [`Worker::adapters`].
    pub(crate) workers: Vec<Worker>,
    /// Kinds of the transports that carry KV events.
    pub(crate) event_planes: BTreeSet<String>,
    /// What `--namespace` and `--model` left out, as `namespace/model`.
    pub(crate) left_out: BTreeSet<String>,
    pub(crate) frontends: Vec<Frontend>,
    /// Seconds between two readings of the counters; without them only totals are known.
    pub(crate) watched_seconds: Option<u64>,
}

/// What a worker does, by its model card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    Prefill,
    Decode,
    Aggregated,
    Encode,
}

impl Role {
    /// From the wire value of Dynamo's `WorkerType`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "prefill" => Some(Self::Prefill),
            "decode" => Some(Self::Decode),
            "aggregated" => Some(Self::Aggregated),
            "encode" => Some(Self::Encode),
            _ => None,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
            Self::Encode => "encode",
        })
    }
}

/// One worker: a model card with its event sources and its metrics.
#[derive(Debug, Clone, Default)]
pub(crate) struct Worker {
    pub(crate) namespace: String,
    pub(crate) component: String,
    pub(crate) instance_id: u64,
    pub(crate) model: String,
    /// Key or file of the model card.
    pub(crate) card: String,
    pub(crate) role: Option<Role>,
    /// Tokens in a block, by the card.
    pub(crate) block_size_tokens: Option<u64>,
    pub(crate) data_parallel_ranks: u64,
    /// `kv_event_publishing_enabled`; workers before Dynamo 1.6 do not say.
    pub(crate) publishes_events: Option<bool>,
    /// `kv_event_source_mode`, where it is not the engine's own events.
    pub(crate) event_source_mode: Option<String>,
    pub(crate) local_indexer: Option<bool>,
    /// Why a router makes no claims about it, by what it advertises.
    pub(crate) no_claims: Option<NoCapability>,
    /// Ranks with a registered source of KV events.
    pub(crate) event_source_ranks: BTreeSet<u64>,
    /// Router configuration that the card carries.
    pub(crate) router: Option<CardRouter>,
    /// The topology domain that KV must not leave, as `domain=value`.
    pub(crate) required_domain: Option<String>,
    /// Fields of the card that a frontend compares, the block size aside; workers whose fields
    /// differ are not taken into one pool.
    pub(crate) compared: BTreeMap<String, String>,
    /// LoRA adapters that are loaded on it.
    pub(crate) adapters: BTreeSet<String>,
    /// Base of the system port's URLs.
    pub(crate) system_url: Option<String>,
    pub(crate) metrics: Option<WorkerMetrics>,
    /// Why there are no metrics.
    pub(crate) metrics_error: Option<String>,
}

impl Worker {
    /// How findings name it.
    pub(crate) fn name(&self) -> String {
        let role = self
            .role
            .map_or_else(String::new, |role| format!("{role} "));
        format!(
            "{role}worker {}/{}/{:x}",
            self.namespace, self.component, self.instance_id
        )
    }
}

/// The part of a card's router configuration that bears on the flag.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CardRouter {
    /// Without underscores, lower case: `kv`, `roundrobin`.
    pub(crate) mode: Option<String>,
    pub(crate) weight: Option<f64>,
    pub(crate) use_kv_events: Option<bool>,
    pub(crate) conditional_disagg: Option<bool>,
}

/// What a worker's `/metrics` show.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct WorkerMetrics {
    pub(crate) url: String,
    pub(crate) prefix_caching: Option<bool>,
    /// Since the worker's start.
    pub(crate) total: WorkerCounters,
    /// During the watch; `None` without one, and after a restart within it.
    pub(crate) watched: Option<WorkerCounters>,
}

/// Counters of one worker.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct WorkerCounters {
    /// Requests at the endpoint `generate`.
    pub(crate) requests: Option<f64>,
    /// "Stored" events that the worker's publisher took from the engine.
    pub(crate) stored_events: Option<f64>,
    /// Events that were lost or refused on the way from the engine to the publisher.
    pub(crate) lost_events: Option<f64>,
    /// Prompt tokens that the engine did not find in its own cache.
    pub(crate) new_tokens: Option<f64>,
}

/// One frontend.
#[derive(Debug, Clone)]
pub(crate) struct Frontend {
    pub(crate) url: String,
    /// What it shows, or why it could not be read.
    pub(crate) metrics: Result<FrontendMetrics, String>,
}

/// What a frontend's `/metrics` show.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct FrontendMetrics {
    /// Whether any metric is Dynamo's.
    pub(crate) is_dynamo: bool,
    /// By model.
    pub(crate) ready: BTreeMap<String, bool>,
    /// Workers that a KV router of this frontend has, by id.
    pub(crate) registered: BTreeMap<u64, Role>,
    /// Pools whose KV events it takes.
    pub(crate) takes_events: Vec<TakesEvents>,
    /// Direct ZMQ event sources that are connected, of all pools.
    pub(crate) zmq_sources: Option<f64>,
    /// Events that the index refused, by reason, since the frontend's start.
    pub(crate) refused_events: BTreeMap<String, f64>,
    /// Prompt tokens at decode selections, by model.
    pub(crate) decode_overlap: BTreeMap<String, Overlap>,
    /// Since the frontend's start.
    pub(crate) total: FrontendCounters,
    /// During the watch.
    pub(crate) watched: Option<FrontendCounters>,
}

/// A pool whose KV events a frontend takes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TakesEvents {
    pub(crate) namespace: String,
    pub(crate) model: String,
    pub(crate) role: Role,
    /// Workers whose events it does not get.
    pub(crate) missing_workers: f64,
}

/// Cached prefix tokens when decode workers were chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Overlap {
    /// On the worker that had most.
    pub(crate) best_tokens: f64,
    /// On the worker that was chosen.
    pub(crate) chosen_tokens: f64,
}

/// Counters of one frontend.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct FrontendCounters {
    pub(crate) requests: Option<f64>,
    /// Batches of KV events by direct ZMQ, of all pools.
    pub(crate) event_batches: Option<f64>,
}

/// The workers of one model in one namespace.
#[derive(Debug)]
pub(crate) struct Pool<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) model: &'a str,
    pub(crate) workers: Vec<&'a Worker>,
}

impl<'a> Pool<'a> {
    /// How findings name it.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.namespace, self.model)
    }

    pub(crate) fn of(&self, role: Role) -> impl Iterator<Item = &'a Worker> {
        self.workers
            .iter()
            .copied()
            .filter(move |worker| worker.role == Some(role))
    }
}

impl Deployment {
    /// The pools, by namespace and model.
    pub(crate) fn pools(&self) -> Vec<Pool<'_>> {
        let mut pools: BTreeMap<(&str, &str), Vec<&Worker>> = BTreeMap::new();
        for worker in &self.workers {
            let key = (worker.namespace.as_str(), worker.model.as_str());
            pools.entry(key).or_default().push(worker);
        }
        pools
            .into_iter()
            .map(|((namespace, model), workers)| Pool {
                namespace,
                model,
                workers,
            })
            .collect()
    }
}
