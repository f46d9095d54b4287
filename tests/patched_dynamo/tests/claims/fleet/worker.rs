// SPDX-License-Identifier: Apache-2.0

//! Workers without an engine: they do as scripted, keep what they were sent, and publish the KV
//! events that a test has them publish, over Dynamo's event plane and with its local indexer.

use std::collections::{HashMap, VecDeque};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, anyhow, ensure};
use async_trait::async_trait;
use dynamo_kv_router::compute_block_hash_for_seq;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, KvTransferEnforcement, LocalBlockHash,
    compute_seq_hash_for_block,
};
use dynamo_llm::kv_router::publisher::KvEventPublisher;
use dynamo_llm::local_model::LocalModelBuilder;
use dynamo_llm::local_model::runtime_config::{DisaggregatedEndpoint, ModelRuntimeConfig};
use dynamo_llm::model_type::{ModelInput, ModelType};
use dynamo_llm::protocols::common::FinishReason;
use dynamo_llm::protocols::common::llm_backend::LLMEngineOutput;
use dynamo_llm::types::Annotated;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::component::{Endpoint, StartedEndpoint};
use dynamo_runtime::engine::{AsyncEngineContext, AsyncEngineContextProvider};
use dynamo_runtime::error::{DynamoError, ErrorClass};
use dynamo_runtime::pipeline::network::Ingress;
use dynamo_runtime::pipeline::{AsyncEngine, Error, ManyOut, ResponseStream, SingleIn};
use dynamo_runtime::protocols::maybe_error::MaybeError;
use dynamo_runtime::{DistributedRuntime, Runtime};
use futures::StreamExt;
use kvdelta_recorder::deployment::distributed;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::run::{LIMIT, workers};
use super::script::{Script, Step};

/// A prompt that a worker answers whatever its script, and does not keep.
pub(super) const PROBE: [u32; 3] = [97, 98, 99];
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
    /// For prefill workers: whether decode starts at the same time, as with SGLang.
    pub(crate) bootstrap: bool,
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
            bootstrap: false,
        }
    }
}

impl Spec {
    fn runtime_config(&self) -> ModelRuntimeConfig {
        let mut config = ModelRuntimeConfig {
            total_kv_blocks: Some(self.blocks),
            max_num_batched_tokens: Some(8192),
            data_parallel_size: self.ranks,
            enable_local_indexer: self.events,
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

/// How a request ended at a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It has not.
    Running,
    /// By the last output.
    Finished,
    /// The worker refused it.
    Refused,
    /// The router or the client gave it up.
    Aborted,
    /// The worker died.
    Died,
}

/// A request as a worker got it.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    /// Its place among all that the fleet's workers got.
    pub(crate) order: u64,
    /// Dynamo's id of the request, the same for both legs.
    pub(crate) id: String,
    /// The whole request, undecoded.
    pub(crate) request: Value,
    /// How it ended.
    pub(crate) outcome: Outcome,
}

impl Received {
    /// The rank that it was sent to, if the router chose one.
    pub(crate) fn rank(&self) -> Option<u64> {
        self.request.pointer("/routing/dp_rank")?.as_u64()
    }

    /// The claim that came with it.
    pub(crate) fn claim(&self) -> Option<&Value> {
        self.request
            .get("decode_cache_info")
            .filter(|claim| !claim.is_null())
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
        .endpoint("generate"))
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
        self.publish(rank, KvCacheEventData::Stored(stored))
    }

    /// Publishes that a rank holds blocks no more.
    pub(crate) fn remove(&self, rank: usize, hashes: &[u64]) -> Result<()> {
        let hashes = hashes.iter().copied().map(ExternalSequenceBlockHash);
        let removed = KvCacheRemoveData {
            block_hashes: hashes.collect(),
        };
        self.publish(rank, KvCacheEventData::Removed(removed))
    }

    /// Publishes that a rank holds nothing.
    pub(crate) fn clear(&self, rank: usize) -> Result<()> {
        self.publish(rank, KvCacheEventData::Cleared)
    }

    fn block_hashes(&self, tokens: &[u32]) -> Vec<LocalBlockHash> {
        let options = BlockHashOptions {
            is_eagle: Some(self.spec.eagle),
            ..BlockHashOptions::default()
        };
        compute_block_hash_for_seq(tokens, self.spec.block_tokens, options)
    }

    fn publish(&self, rank: usize, data: KvCacheEventData) -> Result<()> {
        let events = self.events.get(rank);
        let events =
            events.with_context(|| format!("{} has no events of rank {rank}", self.name()))?;
        let event = KvCacheEvent {
            event_id: events.next_event_id(),
            data,
            dp_rank: u32::try_from(rank)?,
        };
        let sent = events.publish(event);
        sent.map_err(|_| anyhow!("{}: its KV events ended", self.name()))
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
                true,
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

struct State {
    name: String,
    role: WorkerType,
    order: Arc<AtomicU64>,
    next: Mutex<VecDeque<Script>>,
    always: Mutex<Script>,
    received: watch::Sender<Vec<Received>>,
    dead: watch::Sender<bool>,
}

impl State {
    fn script(&self) -> Script {
        let next = lock(&self.next).pop_front();
        next.unwrap_or_else(|| lock(&self.always).clone())
    }

    fn output(&self, last: bool) -> LLMEngineOutput {
        let prefill = self.role == WorkerType::Prefill;
        LLMEngineOutput {
            token_ids: vec![10],
            finish_reason: last.then_some(FinishReason::Length),
            disaggregated_params: (prefill && last).then(|| json!({ "from": self.name })),
            index: Some(0),
            ..LLMEngineOutput::default()
        }
    }
}

struct Engine(Arc<State>);

#[async_trait]
impl AsyncEngine<SingleIn<Value>, ManyOut<Annotated<LLMEngineOutput>>, Error> for Engine {
    async fn generate(
        &self,
        input: SingleIn<Value>,
    ) -> Result<ManyOut<Annotated<LLMEngineOutput>>, Error> {
        let (request, context) = input.into_parts();
        let context = context.context();
        let state = self.0.clone();
        if request.get("token_ids") == Some(&json!(PROBE)) {
            let output = Annotated::from_data(state.output(true));
            let outputs = futures::stream::iter([output]);
            return Ok(ResponseStream::new(outputs.boxed(), context));
        }
        let mut run = Run::begin(state, request, context.clone());
        if let Next::Refused(error) = run.next(&|step| matches!(step, Step::Begin)).await {
            return Err(error.into());
        }
        let outputs = futures::stream::unfold(run, |mut run| async move {
            match run
                .next(&|step| matches!(step, Step::Token | Step::Finish))
                .await
            {
                Next::Step(step) => {
                    let last = matches!(step, Step::Finish);
                    if last {
                        run.end(Outcome::Finished);
                    }
                    Some((Annotated::from_data(run.state.output(last)), run))
                }
                Next::Refused(error) => Some((Annotated::from_err(error), run)),
                Next::Ended => None,
            }
        });
        Ok(ResponseStream::new(outputs.boxed(), context))
    }
}

/// A request at its worker.
struct Run {
    state: Arc<State>,
    context: Arc<dyn AsyncEngineContext>,
    steps: VecDeque<Step>,
    place: usize,
}

/// What a run comes to.
enum Next {
    Step(Step),
    Refused(DynamoError),
    Ended,
}

/// What unwinds a request of a dead worker, so that its connection closes without an end.
struct Death;

impl Run {
    fn begin(state: Arc<State>, request: Value, context: Arc<dyn AsyncEngineContext>) -> Self {
        let steps = state.script().0.into();
        let mut place = 0;
        state.received.send_modify(|received| {
            place = received.len();
            received.push(Received {
                order: state.order.fetch_add(1, Ordering::SeqCst),
                id: context.id().to_owned(),
                request,
                outcome: Outcome::Running,
            });
        });
        Self {
            state,
            context,
            steps,
            place,
        }
    }

    /// Goes on to the next step that is `wanted`.
    async fn next(&mut self, wanted: &(dyn Fn(&Step) -> bool + Sync)) -> Next {
        self.die_if_dead();
        while let Some(step) = self.steps.pop_front() {
            match step {
                step if wanted(&step) => return Next::Step(step),
                Step::Wait(gate) => {
                    let mut dead = self.state.dead.subscribe();
                    tokio::select! {
                        () = gate.pass() => {}
                        _ = dead.wait_for(|dead| *dead) => {}
                        () = self.context.stopped() => {
                            self.end(Outcome::Aborted);
                            self.steps.clear();
                            return Next::Refused(refusal(ErrorClass::Cancelled, &self.state.name));
                        }
                    }
                    self.die_if_dead();
                }
                Step::Refuse(class) => {
                    self.end(Outcome::Refused);
                    self.steps.clear();
                    return Next::Refused(refusal(class, &self.state.name));
                }
                Step::Die => {
                    self.state.dead.send_replace(true);
                    self.die_if_dead();
                }
                Step::Begin | Step::Token | Step::Finish => {}
            }
        }
        Next::Ended
    }

    fn die_if_dead(&self) {
        if *self.state.dead.borrow() {
            self.end(Outcome::Died);
            resume_unwind(Box::new(Death));
        }
    }

    fn end(&self, outcome: Outcome) {
        self.state.received.send_modify(|received| {
            let this = &mut received[self.place];
            if this.outcome == Outcome::Running {
                this.outcome = outcome;
            }
        });
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.end(Outcome::Aborted);
    }
}

fn refusal(class: ErrorClass, name: &str) -> DynamoError {
    DynamoError::builder()
        .class(class)
        .message(format!("{name} refuses as its script says"))
        .build()
}
