// SPDX-License-Identifier: Apache-2.0

//! Workers without an engine: they do as scripted, keep what they were sent, and publish the KV
//! events that a test has them publish, over Dynamo's event plane and with its local indexer.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, anyhow, ensure};
use dynamo_kv_router::compute_block_hash_for_seq;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, KvTransferEnforcement, LocalBlockHash, StorageTier,
    compute_seq_hash_for_block,
};
use dynamo_llm::kv_router::publisher::KvEventPublisher;
use dynamo_llm::local_model::LocalModelBuilder;
use dynamo_llm::local_model::runtime_config::{DisaggregatedEndpoint, ModelRuntimeConfig};
use dynamo_llm::model_type::{ModelInput, ModelType};
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::component::{Endpoint, StartedEndpoint};
use dynamo_runtime::discovery::ModelCardInstanceId;
use dynamo_runtime::pipeline::network::Ingress;
use dynamo_runtime::{DistributedRuntime, Runtime};
use kvdelta_recorder::deployment::distributed;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::engine::{Engine, Received, State, lock};
use super::run::{LIMIT, workers};
use super::script::Script;

const ENDPOINT: &str = "generate";
/// Where a decode worker says that it settles claims.
const CAPABILITY_KEY: &str = "decode_cache_info";
/// The domain in which a worker's zone stands.
const DOMAIN: &str = "zone";

/// What a worker tells of itself.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    /// Data-parallel ranks.
    pub(crate) ranks: u32,
    /// Tokens in a block; the same for all workers of a role.
    pub(crate) block_tokens: u32,
    /// Blocks in the device memory of a rank.
    pub(crate) blocks: u64,
    /// Taints that requests must name.
    pub(crate) taints: Vec<String>,
    /// Topology domain that prefill and decode of a request have to share.
    pub(crate) zone: Option<String>,
    /// What it advertises besides, by key.
    pub(crate) runtime_data: HashMap<String, Value>,
    /// Whether it drafts tokens with EAGLE.
    pub(crate) eagle: bool,
    /// Whether it publishes KV events.
    pub(crate) events: bool,
    /// Whether it keeps them for those that come late.
    pub(crate) local_indexer: bool,
    /// For prefill workers: whether decode starts at the same time, as with SGLang.
    pub(crate) bootstrap: bool,
    /// For prefill workers: whether they leave out what a claim says.
    pub(crate) cuts: bool,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            ranks: 1,
            block_tokens: 8,
            blocks: 4096,
            taints: Vec::new(),
            zone: None,
            runtime_data: HashMap::new(),
            eagle: false,
            events: true,
            local_indexer: true,
            bootstrap: false,
            cuts: false,
        }
    }
}

/// What a decode worker with these blocks advertises that settles claims.
pub(crate) fn capability(block_tokens: u32) -> Value {
    json!({
        "version": 1,
        "block_size": block_tokens,
        "prefix_caching": true,
        "cache_groups": ["full_attention"],
    })
}

impl Spec {
    /// A decode worker that settles claims.
    pub(crate) fn claims() -> Self {
        let spec = Self::default();
        let capability = capability(spec.block_tokens);
        spec.advertises(capability)
    }

    /// The same with tiers below device memory, from which a load can fail.
    pub(crate) fn with_lower_tiers() -> Self {
        let spec = Self::default();
        let mut capability = capability(spec.block_tokens);
        capability["lower_tiers"] = true.into();
        spec.advertises(capability)
    }

    /// It advertises this of claims.
    pub(crate) fn advertises(mut self, capability: Value) -> Self {
        self.runtime_data
            .insert(CAPABILITY_KEY.to_owned(), capability);
        self
    }

    /// A prefill worker that cuts its offer for a claim.
    pub(crate) fn cuts() -> Self {
        Self {
            cuts: true,
            ..Self::default()
        }
    }

    fn runtime_config(&self) -> ModelRuntimeConfig {
        let mut config = ModelRuntimeConfig {
            total_kv_blocks: Some(self.blocks),
            max_num_batched_tokens: Some(8192),
            data_parallel_size: self.ranks,
            enable_local_indexer: self.events && self.local_indexer,
            kv_event_publishing_enabled: Some(self.events),
            runtime_data: self.runtime_data.clone(),
            enable_eagle: self.eagle,
            taints: self.taints.iter().cloned().collect(),
            ..ModelRuntimeConfig::default()
        };
        if let Some(zone) = &self.zone {
            config
                .topology_domains
                .insert(DOMAIN.to_owned(), zone.clone());
            config.kv_transfer_domain = Some(DOMAIN.to_owned());
            config.kv_transfer_enforcement = Some(KvTransferEnforcement::Required);
            config.add_topology_taints();
        }
        if self.bootstrap {
            // Nobody connects to it.
            config.disaggregated_endpoint = Some(DisaggregatedEndpoint {
                bootstrap_host: Some("127.0.0.1".to_owned()),
                bootstrap_port: Some(9),
            });
        }
        config
    }
}

/// What the workers of a fleet have in common.
#[derive(Debug)]
pub(super) struct Common<'a> {
    pub(super) namespace: &'a str,
    pub(super) discovery: &'a Path,
    pub(super) model: &'a Path,
    pub(super) order: &'a Arc<AtomicU64>,
}

/// A worker that serves.
pub(crate) struct Worker {
    /// Its id in Dynamo.
    pub(crate) id: u64,
    /// Prefill or decode.
    pub(crate) role: WorkerType,
    /// What it told of itself.
    pub(crate) spec: Spec,
    state: Arc<State>,
    events: Vec<KvEventPublisher>,
    runtime: DistributedRuntime,
    namespace: String,
    gone: Mutex<bool>,
    _endpoint: StartedEndpoint,
}

/// The endpoint of all workers of a role.
pub(super) fn endpoint(
    runtime: &DistributedRuntime,
    namespace: &str,
    role: WorkerType,
) -> Result<Endpoint> {
    Ok(runtime
        .namespace(namespace)?
        .component(role.as_str())?
        .endpoint(ENDPOINT))
}

impl Worker {
    /// Starts a worker and waits until it can be discovered.
    pub(super) async fn start(
        common: Common<'_>,
        role: WorkerType,
        name: String,
        spec: Spec,
    ) -> Result<Self> {
        let runtime = distributed(&Runtime::from_handle(workers())?, common.discovery).await?;
        let endpoint = endpoint(&runtime, common.namespace, role)?;
        let state = Arc::new(State {
            name,
            role,
            order: common.order.clone(),
            next: Mutex::new(VecDeque::new()),
            always: Mutex::new(Script::answer()),
            received: watch::Sender::new(Vec::new()),
            dead: watch::Sender::new(false),
            cuts: spec.cuts,
        });
        let (model, namespace) = (common.model.to_owned(), common.namespace.to_owned());
        let (started, told) = (state.clone(), spec.clone());
        let (of_endpoint, id) = (endpoint.clone(), runtime.connection_id());
        let (endpoint, events) = workers()
            .spawn(
                async move { serve(of_endpoint, role, &namespace, &model, &told, started).await },
            )
            .await??;
        Ok(Self {
            id,
            role,
            spec,
            state,
            events,
            runtime,
            namespace: common.namespace.to_owned(),
            gone: Mutex::new(false),
            _endpoint: endpoint,
        })
    }

    /// Its name in reports, such as `decode 0`.
    pub(crate) fn name(&self) -> &str {
        &self.state.name
    }

    /// What it does with the next requests, one script for each; then as always.
    pub(crate) fn next(&self, script: Script) {
        lock(&self.state.next).push_back(script);
    }

    /// What it does with all other requests from now on.
    pub(crate) fn always(&self, script: Script) {
        *lock(&self.state.always) = script;
    }

    /// What it was sent so far.
    pub(crate) fn received(&self) -> Vec<Received> {
        self.state.received.borrow().clone()
    }

    /// Waits until what it was sent is as said, and returns it.
    pub(crate) async fn until(
        &self,
        what: &str,
        enough: impl Fn(&[Received]) -> bool,
    ) -> Result<Vec<Received>> {
        let mut received = self.state.received.subscribe();
        let waited = tokio::time::timeout(LIMIT, received.wait_for(|all| enough(all))).await;
        match waited {
            Ok(received) => Ok(received?.clone()),
            Err(_) => Err(anyhow!(
                "{}: not within {LIMIT:?}: {what}; it got {:?}",
                self.name(),
                self.received()
            )),
        }
    }

    /// Waits until it was sent as many requests as said.
    pub(crate) async fn until_received(&self, requests: usize) -> Result<Vec<Received>> {
        let what = format!("{requests} requests");
        self.until(&what, |all| all.len() >= requests).await
    }

    /// Publishes that a rank holds the whole blocks of `tokens`, from position 0. An engine's hashes
    /// are Dynamo's here; returns them.
    pub(crate) fn store(&self, rank: usize, tokens: &[u32]) -> Result<Vec<u64>> {
        let hashes = compute_seq_hash_for_block(&self.block_hashes(tokens));
        self.store_after(rank, None, tokens, &hashes)?;
        Ok(hashes)
    }

    /// Publishes that a rank holds blocks after the one with the hash `parent`, or from position 0,
    /// under these hashes of the engine, one for each whole block of `tokens`.
    pub(crate) fn store_after(
        &self,
        rank: usize,
        parent: Option<u64>,
        tokens: &[u32],
        hashes: &[u64],
    ) -> Result<()> {
        let blocks = self.block_hashes(tokens);
        ensure!(
            blocks.len() == hashes.len(),
            "{} hashes for {} blocks",
            hashes.len(),
            blocks.len()
        );
        let blocks = blocks
            .into_iter()
            .zip(hashes)
            .map(|(tokens_hash, hash)| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(*hash),
                tokens_hash,
                mm_extra_info: None,
            })
            .collect();
        let stored = KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks,
        };
        self.publish(rank, KvCacheEventData::Stored(stored), StorageTier::Device)
    }

    /// Publishes that a rank holds the whole blocks of `tokens` after the first `skipped` in host
    /// memory.
    pub(crate) fn store_on_host(&self, rank: usize, tokens: &[u32], skipped: usize) -> Result<()> {
        let blocks = self.block_hashes(tokens);
        let hashes = compute_seq_hash_for_block(&blocks);
        let mut stored =
            blocks
                .into_iter()
                .zip(&hashes)
                .map(|(tokens_hash, hash)| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(*hash),
                    tokens_hash,
                    mm_extra_info: None,
                });
        let parent = stored.by_ref().take(skipped).last();
        let stored = KvCacheStoreData {
            parent_hash: parent.map(|block| block.block_hash),
            start_position: None,
            blocks: stored.collect(),
        };
        self.publish(
            rank,
            KvCacheEventData::Stored(stored),
            StorageTier::HostPinned,
        )
    }

    /// Publishes that a rank holds blocks no more.
    pub(crate) fn remove(&self, rank: usize, hashes: &[u64]) -> Result<()> {
        let hashes = hashes.iter().copied().map(ExternalSequenceBlockHash);
        let removed = KvCacheRemoveData {
            block_hashes: hashes.collect(),
        };
        self.publish(
            rank,
            KvCacheEventData::Removed(removed),
            StorageTier::Device,
        )
    }

    /// Publishes that a rank holds nothing.
    pub(crate) fn clear(&self, rank: usize) -> Result<()> {
        self.publish(rank, KvCacheEventData::Cleared, StorageTier::Device)
    }

    fn block_hashes(&self, tokens: &[u32]) -> Vec<LocalBlockHash> {
        let options = BlockHashOptions {
            is_eagle: Some(self.spec.eagle),
            ..BlockHashOptions::default()
        };
        compute_block_hash_for_seq(tokens, self.spec.block_tokens, options)
    }

    fn publish(&self, rank: usize, data: KvCacheEventData, tier: StorageTier) -> Result<()> {
        let events = self.events.get(rank);
        let events =
            events.with_context(|| format!("{} has no events of rank {rank}", self.name()))?;
        let event = KvCacheEvent {
            event_id: events.next_event_id(),
            data,
            dp_rank: u32::try_from(rank)?,
        };
        let sent = events.publish_with_storage_tier(event, tier);
        sent.map_err(|_| anyhow!("{}: its KV events ended", self.name()))
    }

    /// Tells discovery its taints anew.
    pub(crate) async fn taint(&self, taints: &[&str]) -> Result<()> {
        let card = ModelCardInstanceId {
            namespace: self.namespace.clone(),
            component: self.role.as_str().to_owned(),
            endpoint: ENDPOINT.to_owned(),
            instance_id: self.id,
            model_suffix: None,
        };
        let taints = taints.iter().map(|taint| (*taint).to_owned()).collect();
        self.runtime
            .discovery()
            .update_model_taints(card, taints)
            .await
    }

    /// Dies as a killed process does: what it runs and what it is sent from now on ends without an
    /// answer. Discovery still has it, as long as a lease lasts: [`Self::leave`].
    pub(crate) fn die(&self) {
        self.state.dead.send_replace(true);
    }

    /// Leaves discovery and takes no more requests. What runs is finished, as when a worker drains.
    pub(crate) fn leave(&self) {
        *lock(&self.gone) = true;
        self.runtime.shutdown();
    }

    /// Whether it died or left: then the router forgets what it had booked there.
    pub(crate) fn is_gone(&self) -> bool {
        *lock(&self.gone) || *self.state.dead.borrow()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !*lock(&self.gone) {
            self.leave();
        }
    }
}

/// Registers the worker's card and serves its endpoint; its KV event publishers, by rank.
async fn serve(
    endpoint: Endpoint,
    role: WorkerType,
    model_name: &str,
    model: &Path,
    spec: &Spec,
    state: Arc<State>,
) -> Result<(StartedEndpoint, Vec<KvEventPublisher>)> {
    let mut local = LocalModelBuilder::default()
        .model_path(model.to_owned())
        .model_name(Some(model_name.to_owned()))
        .kv_cache_block_size(Some(spec.block_tokens))
        .runtime_config(spec.runtime_config())
        .build()
        .await?;
    let (surface, needs) = match role {
        WorkerType::Prefill => (ModelType::empty(), WorkerType::Decode),
        _ => (
            ModelType::Chat | ModelType::Completions,
            WorkerType::Prefill,
        ),
    };
    let ranks = if spec.events { spec.ranks } else { 0 };
    let events = (0..ranks)
        .map(|rank| {
            KvEventPublisher::new_with_local_indexer(
                endpoint.clone(),
                spec.block_tokens,
                None,
                spec.local_indexer,
                rank,
                None,
            )
        })
        .collect::<Result<Vec<_>>>()?;
    local
        .attach(
            &endpoint,
            surface,
            ModelInput::Tokens,
            None,
            Some(role),
            vec![vec![needs]],
        )
        .await?;
    let serving = endpoint
        .endpoint_builder()
        .handler(Ingress::for_engine(Arc::new(Engine(state)))?)
        .start_with_registration()
        .await?;
    Ok((serving, events))
}
