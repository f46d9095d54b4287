// SPDX-License-Identifier: Apache-2.0

//! Random histories through Dynamo's scheduler with its default policy: what is chosen, what is
//! booked, and what the router tells its replicas and its load monitor.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dynamo_kv_router::config::RouterConfigOverride;
use dynamo_kv_router::protocols::{
    ActiveSequenceEvent, ActiveSequenceEventData, BlockHashOptions, RoutingConstraints,
    WorkerAffinityTarget, WorkerId, WorkerWithDpRank,
};
use dynamo_kv_router::scheduling::overlap::OverlapSignals;
use dynamo_kv_router::scheduling::{
    NoopOverlapScoresRefresh, ScheduleMode, ScheduleRequest, TierOverlapBlocks,
};
use dynamo_kv_router::sequences::SchedulerLoadSnapshot;
use dynamo_kv_router::{
    ActiveSequencesMultiWorker, KvRouterConfig, KvSchedulerError, LocalScheduler,
    RouterQueuePolicy, RoutingPartitionRef, SchedulingResponse, SequencePublisher, SessionContext,
    SharedCacheHits, WorkerConfigLike, WorkerInputs, WorkerSelectionPolicy, WorkerSelector,
    WorkerType,
};
use kvdelta_recorder::settings::Settings;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::record::Record;

const BLOCK_TOKENS: u32 = 16;
const STEPS: usize = 320;
const PREFIXES: usize = 6;
/// Equal costs are settled by a draw over workers in an order that differs between two runs. As
/// many draws tell a tie from a choice, and then all of its workers (11 at most, each missed with a
/// chance below 1e-13).
const DRAWS_TO_SEE_A_TIE: u64 = 40;
const DRAWS_TO_SEE_ALL: u64 = 400;

/// Records a history for each role, with conditional disaggregation off and on, for some settings.
pub(crate) fn record(settings: &Settings, seed: u64, record: &mut Record) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut history = 0;
    for role in [
        WorkerType::Prefill,
        WorkerType::Decode,
        WorkerType::Aggregated,
    ] {
        for conditional in [false, true] {
            for variation in [
                Variation::Default,
                Variation::Weights,
                Variation::NoReuse,
                Variation::Queue,
                Variation::Untracked,
            ] {
                let mut config = settings.config();
                config.conditional_disagg_enabled = conditional;
                variation.apply(&mut config);
                record.bytes("config", serde_json::to_string(&config)?)?;
                history += 1;
                runtime.block_on(async {
                    History::new(role, variation, config, seed * 1000 + history)?
                        .run(record)
                        .await
                })?;
            }
        }
    }
    Ok(())
}

/// What differs from the default settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variation {
    Default,
    Weights,
    NoReuse,
    Queue,
    Untracked,
}

impl Variation {
    fn apply(self, config: &mut KvRouterConfig) {
        match self {
            Self::Default => {}
            Self::Weights => {
                config.overlap_score_credit = 0.5;
                config.overlap_score_credit_decay = 0.6;
                config.host_cache_hit_weight = 0.25;
                config.disk_cache_hit_weight = 0.1;
                config.decode_active_request_weight = 0.7;
                config.prefill_load_scale = 1.5;
                config.shared_cache_multiplier = Some(0.6);
            }
            Self::NoReuse => {
                config.router_assume_kv_reuse = false;
                config.router_track_prefill_tokens = false;
            }
            Self::Queue => {
                config.router_queue_threshold = Some(0.25);
                config.router_queue_policy = RouterQueuePolicy::Wspt;
            }
            Self::Untracked => config.router_track_active_blocks = false,
        }
    }
}

/// A worker as its model card describes it.
#[derive(Clone, Debug, PartialEq)]
struct Worker {
    ranks: u32,
    batched_tokens: Option<u64>,
    taints: HashSet<String>,
}

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        self.ranks
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        self.batched_tokens
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        Some(4096)
    }

    fn taints(&self) -> &HashSet<String> {
        &self.taints
    }
}

/// What a router publishes, kept in order.
#[derive(Clone, Debug, Default)]
struct Published(Arc<Mutex<Traffic>>);

#[derive(Debug, Default)]
struct Traffic {
    events: Vec<ActiveSequenceEvent>,
    loads: Vec<Value>,
}

impl Published {
    fn load(&self, load: Value) {
        let mut traffic = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        traffic.loads.push(load);
    }

    fn take(&self) -> Traffic {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl SequencePublisher for Published {
    fn enqueue_event(&self, event: ActiveSequenceEvent) -> Result<()> {
        let mut traffic = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        traffic.events.push(event);
        Ok(())
    }

    fn publish_scheduler_load(&self, load: SchedulerLoadSnapshot) {
        self.load(json!([
            "load",
            load.worker,
            load.active_decode_blocks,
            load.active_prefill_tokens
        ]));
    }

    fn observe_load(&self, worker: &WorkerWithDpRank, role: &str, blocks: usize, tokens: usize) {
        self.load(json!(["gauge", worker, role, blocks, tokens]));
    }

    fn observe_worker_registered(&self, worker: &WorkerWithDpRank, role: &str) {
        self.load(json!(["registered", worker, role]));
    }

    fn observe_worker_removed(&self, worker: &WorkerWithDpRank, role: &str) {
        self.load(json!(["removed", worker, role]));
    }
}

type Scheduler = LocalScheduler<Published, Worker, WorkerSelectionPolicy>;
type Scheduled = Result<SchedulingResponse, KvSchedulerError>;

/// One router with its pool of workers.
struct History {
    role: WorkerType,
    variation: Variation,
    config: KvRouterConfig,
    random: fastrand::Rng,
    published: Published,
    slots: Arc<ActiveSequencesMultiWorker<Published>>,
    scheduler: Arc<Scheduler>,
    inputs: WorkerInputs,
    pool: watch::Sender<HashMap<WorkerId, Worker>>,
    stop: CancellationToken,
    prefixes: Vec<Vec<u32>>,
    arrivals: u64,
    waiting: Vec<(String, JoinHandle<Scheduled>)>,
    running: Vec<String>,
    /// Requests of another router.
    others: Vec<(String, WorkerWithDpRank)>,
}

/// A request as the router's host hands it to the scheduler.
#[derive(Clone, Debug)]
struct Arrival {
    tokens: Vec<u32>,
    over: Option<RouterConfigOverride>,
    lora: Option<String>,
    output_tokens: Option<u32>,
    affinity: Option<WorkerAffinityTarget>,
    pinned: Option<WorkerWithDpRank>,
    allowed: Option<HashSet<WorkerId>>,
    constraints: RoutingConstraints,
    priority: (f64, u32),
    session: Option<SessionContext>,
    overlap: OverlapSignals,
    shared: Option<SharedCacheHits>,
}

impl History {
    fn new(
        role: WorkerType,
        variation: Variation,
        config: KvRouterConfig,
        seed: u64,
    ) -> Result<Self> {
        let mut random = fastrand::Rng::with_seed(seed);
        let factory = Settings::policies()?
            .resolve_for_worker_type(&config, role)?
            .context("Dynamo's registry has no default policy")?;
        let policy = factory(
            &config,
            role,
            RoutingPartitionRef::new("recorded", "default"),
        );
        let inputs = WorkerSelector::<Worker>::required_worker_inputs(&policy);
        let label = role.default_selector_label();
        let published = Published::default();
        let workers: HashMap<_, _> = (1..=5).map(|id| (id, worker(id, &mut random))).collect();
        let slots = Arc::new(ActiveSequencesMultiWorker::new(
            published.clone(),
            BLOCK_TOKENS as usize,
            workers.iter().map(|(id, w)| (*id, (0, w.ranks))).collect(),
            true,
            7,
            label,
        ));
        let (pool, watched) = watch::channel(workers);
        let stop = CancellationToken::new();
        let scheduler = Arc::new(LocalScheduler::new(
            slots.clone(),
            watched,
            config.policy_profile(None)?,
            BLOCK_TOKENS,
            policy,
            None,
            None::<Arc<NoopOverlapScoresRefresh>>,
            None,
            None,
            Duration::from_secs(3600),
            config.router_track_prefill_tokens,
            stop.clone(),
            label,
            true,
        ));
        let prefixes = (0..PREFIXES)
            .map(|_| tokens(random.usize(64..1500), &mut random))
            .collect();
        Ok(Self {
            role,
            variation,
            config,
            random,
            published,
            slots,
            scheduler,
            inputs,
            pool,
            stop,
            prefixes,
            arrivals: 0,
            waiting: Vec::new(),
            running: Vec::new(),
            others: Vec::new(),
        })
    }

    async fn run(mut self, record: &mut Record) -> Result<()> {
        record.line(
            "inputs",
            json!([
                self.role,
                format!("{:?}", self.variation),
                self.config.conditional_disagg_enabled,
                format!("{:?}", self.inputs),
            ]),
        )?;
        for _ in 0..STEPS {
            match self.random.usize(0..100) {
                0..56 => self.arrive(record).await?,
                56..80 => self.end_of_one(record).await?,
                80..90 => self.prefilled(record).await?,
                90..94 => self.grow(record)?,
                94..96 => self.change_pool(record)?,
                96..98 => self.replica(record)?,
                _ => self.loads(record)?,
            }
            self.settle(record).await?;
        }
        self.stop.cancel();
        Ok(())
    }

    /// Lets the scheduler's tasks run until nothing more comes of them, and records what came.
    async fn settle(&mut self, record: &mut Record) -> Result<()> {
        for _ in 0..3 {
            self.scheduler.update_queue().await;
            for _ in 0..16 {
                tokio::task::yield_now().await;
            }
        }
        let (ended, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(_, waiting)| waiting.is_finished());
        self.waiting = waiting;
        let ended: Vec<(String, JoinHandle<Scheduled>)> = ended;
        for (id, scheduled) in ended {
            let scheduled = scheduled.await.context("a scheduling task ended early")?;
            record.line("choice", json!([id, outcome(&scheduled)]))?;
            if scheduled.is_ok() && self.scheduler.has_request(&id) {
                self.running.push(id);
            }
        }
        let Traffic { events, mut loads } = self.published.take();
        for event in events {
            record.line("event", event)?;
        }
        // Changes of a pool report its workers in no order.
        loads.sort_by_key(Value::to_string);
        for load in loads {
            record.line("load", load)?;
        }
        record.line(
            "queue",
            json!([
                self.scheduler.pending_count(),
                self.scheduler.pending_isl_tokens()
            ]),
        )
    }

    async fn arrive(&mut self, record: &mut Record) -> Result<()> {
        self.arrivals += 1;
        let id = format!("r{}", self.arrivals);
        let mut arrival = self.arrival();
        let mode = match self.random.usize(0..100) {
            0..60 => ScheduleMode::Tracked {
                request_id: id.clone(),
            },
            60..85 => ScheduleMode::TrackedWithLifecycle {
                request_id: id.clone(),
            },
            _ => ScheduleMode::QueryOnly {
                request_id: Some(id.clone()),
            },
        };
        let seed = self.random.u64(..);
        // In a queue the choice is made later, at a state that cannot be probed now.
        if self.variation == Variation::Queue {
            arrival.pinned = Some(self.any_rank());
        } else {
            let best = self.best(&arrival, seed).await?;
            record.line("choice", json!([id, "best", best]))?;
            if let Ok(ranks) = &best
                && ranks.len() > 1
            {
                arrival.pinned = ranks.first().copied();
            }
        }
        fastrand::seed(seed);
        let request = self.request(&arrival, mode);
        let scheduler = self.scheduler.clone();
        let scheduled = tokio::spawn(async move { scheduler.schedule_request(request).await });
        self.waiting.push((id, scheduled));
        Ok(())
    }

    /// The rank of the lowest cost, or all that share it, or the error.
    async fn best(
        &self,
        arrival: &Arrival,
        seed: u64,
    ) -> Result<Result<Vec<WorkerWithDpRank>, String>> {
        let mut ranks = BTreeSet::new();
        let mut draws = DRAWS_TO_SEE_A_TIE;
        let mut draw = 0;
        while draw < draws {
            fastrand::seed(seed.wrapping_add(draw));
            let mode = ScheduleMode::QueryOnly { request_id: None };
            let request = self.request(arrival, mode);
            match self.scheduler.select_without_admission(request).await {
                Ok(advice) => ranks.insert(advice.response.best_worker),
                Err(error) if ranks.is_empty() => return Ok(Err(error.to_string())),
                Err(error) => bail!("one of equal selections failed: {error}"),
            };
            if ranks.len() > 1 {
                draws = DRAWS_TO_SEE_ALL;
            }
            draw += 1;
        }
        Ok(Ok(ranks.into_iter().collect()))
    }

    fn request(&self, arrival: &Arrival, mode: ScheduleMode) -> ScheduleRequest {
        let options = BlockHashOptions {
            lora_name: arrival.lora.as_deref(),
            ..BlockHashOptions::default()
        };
        ScheduleRequest {
            mode,
            token_seq: self.config.compute_seq_hashes_for_tracking(
                &arrival.tokens,
                BLOCK_TOKENS,
                arrival.over.as_ref(),
                options,
                None,
            ),
            block_hashes: None,
            isl_tokens: arrival.tokens.len(),
            lora_name: arrival.lora.clone(),
            expected_output_tokens: arrival.output_tokens,
            affinity_target: arrival.affinity,
            pinned_worker: arrival.pinned,
            allowed_worker_ids: arrival.allowed.clone(),
            routing_constraints: arrival.constraints.clone(),
            router_config_override: arrival.over.clone(),
            priority_jump: arrival.priority.0,
            strict_priority: arrival.priority.1,
            policy_class: None,
            session_context: arrival.session.clone(),
            overlap: arrival.overlap.clone(),
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: arrival.shared.clone(),
        }
    }

    fn arrival(&mut self) -> Arrival {
        let ranks = self.ranks();
        let random = &mut self.random;
        let mut chance = |percent: usize| random.usize(0..100) < percent;
        let (pin, allow, require, prefer, stick, session, lora, output, shared, jump, cold) = (
            chance(5),
            chance(10),
            chance(10),
            chance(10),
            chance(10),
            chance(10),
            chance(10),
            chance(30),
            chance(15),
            chance(10),
            chance(15),
        );
        let random = &mut self.random;
        let mut prompt = if cold {
            Vec::new()
        } else {
            let prefix = random.choice(&self.prefixes);
            prefix.cloned().unwrap_or_default()
        };
        prompt.extend(tokens(random.usize(1..600), random));
        let blocks = prompt.len() / BLOCK_TOKENS as usize;
        let mut tiers = TierOverlapBlocks::default();
        if !cold {
            for rank in &ranks {
                let device = random.usize(0..=blocks);
                let host = random.usize(0..=blocks - device);
                tiers.device.insert(*rank, device);
                if random.bool() {
                    tiers.host_pinned.insert(*rank, host);
                    let disk = random.usize(0..=blocks - device - host);
                    tiers.disk.insert(*rank, disk);
                }
            }
        }
        let some = *random.choice(&ranks).unwrap_or(&ranks[0]);
        Arrival {
            over: self.over(),
            overlap: self.overlap(&ranks, tiers),
            lora: lora.then(|| "adapter".to_owned()),
            output_tokens: output.then_some(100),
            affinity: stick.then(|| WorkerAffinityTarget::new(some.worker_id, Some(some.dp_rank))),
            pinned: pin.then_some(some),
            allowed: allow.then(|| ranks.iter().take(4).map(|rank| rank.worker_id).collect()),
            constraints: RoutingConstraints {
                required_taints: require.then(|| "zone=a".to_owned()).into_iter().collect(),
                preferred_taints: prefer
                    .then(|| ("zone=b".to_owned(), 0.5))
                    .into_iter()
                    .collect(),
            },
            priority: if jump { (2.5, 1) } else { (0.0, 0) },
            session: session.then(|| SessionContext::new("session".to_owned(), None, None, None)),
            shared: shared
                .then(|| SharedCacheHits::from_ranges(vec![0..1, 2..(blocks as u32).max(3)])),
            tokens: prompt,
        }
    }

    /// What the prefill router adds to a request on its way to a decode worker.
    fn over(&self) -> Option<RouterConfigOverride> {
        (self.role == WorkerType::Decode).then(|| RouterConfigOverride {
            overlap_score_credit: (!self.config.conditional_disagg_enabled).then_some(0.0),
            assume_kv_reuse: Some(false),
            track_prefill_tokens: Some(false),
            ..RouterConfigOverride::default()
        })
    }

    /// The signals that an index derives from overlaps by tier.
    fn overlap(&self, ranks: &[WorkerWithDpRank], tiers: TierOverlapBlocks) -> OverlapSignals {
        let mut signals = OverlapSignals::default();
        for rank in ranks {
            let blocks = |tier: &rustc_hash::FxHashMap<WorkerWithDpRank, usize>| {
                tier.get(rank).copied().unwrap_or_default() as f64
            };
            let effective = blocks(&tiers.device)
                + self.config.host_cache_hit_weight * blocks(&tiers.host_pinned)
                + self.config.disk_cache_hit_weight * blocks(&tiers.disk);
            if effective > 0.0 {
                signals.effective_overlap_blocks.insert(*rank, effective);
                let cached_tokens = (effective * f64::from(BLOCK_TOKENS)).round() as usize;
                signals.effective_cached_tokens.insert(*rank, cached_tokens);
            }
        }
        signals.tier_overlap_blocks = tiers;
        signals
    }

    async fn end_of_one(&mut self, record: &mut Record) -> Result<()> {
        if self.running.is_empty() {
            return Ok(());
        }
        let id = self.running.remove(self.random.usize(..self.running.len()));
        let ended = self.scheduler.free(&id).await;
        record.line("step", json!(["free", id, outcome_of_step(ended)]))
    }

    async fn prefilled(&mut self, record: &mut Record) -> Result<()> {
        let Some(id) = self.random.choice(&self.running).cloned() else {
            return Ok(());
        };
        let marked = self.scheduler.mark_prefill_completed(&id).await;
        record.line("step", json!(["prefilled", id, outcome_of_step(marked)]))
    }

    fn grow(&mut self, record: &mut Record) -> Result<()> {
        let Some(id) = self.random.choice(&self.running).cloned() else {
            return Ok(());
        };
        let decay = self.random.bool().then_some(0.5);
        let grown = self.scheduler.add_output_block(&id, decay);
        record.line("step", json!(["output block", id, outcome_of_step(grown)]))
    }

    fn change_pool(&mut self, record: &mut Record) -> Result<()> {
        let mut pool = self.pool.borrow().clone();
        let id = self.random.u64(1..=6);
        let joins = !pool.contains_key(&id);
        if joins {
            pool.insert(id, worker(id, &mut self.random));
        } else if pool.len() > 3 {
            pool.remove(&id);
        }
        self.pool.send_replace(pool);
        record.line("step", json!(["pool", id, joins]))
    }

    /// Another router tells of a request, or of its end.
    fn replica(&mut self, record: &mut Record) -> Result<()> {
        let ends = !self.others.is_empty() && self.random.bool();
        let (request_id, worker, data) = if ends {
            let some = self.random.usize(..self.others.len());
            let (id, worker) = self.others.remove(some);
            (id, worker, ActiveSequenceEventData::Free)
        } else {
            self.arrivals += 1;
            let (id, worker) = (format!("other {}", self.arrivals), self.any_rank());
            let arrival = self.arrival();
            fastrand::seed(self.random.u64(..));
            let request = self.request(&arrival, ScheduleMode::QueryOnly { request_id: None });
            self.others.push((id.clone(), worker));
            let data = ActiveSequenceEventData::AddRequest {
                token_sequence: request.token_seq,
                track_prefill_tokens: self.role != WorkerType::Decode,
                expected_output_tokens: None,
                prefill_load_hint: None,
            };
            (id, worker, data)
        };
        record.line("step", json!(["replica", request_id, worker, ends]))?;
        self.slots.apply_replica_batch(vec![ActiveSequenceEvent {
            request_id,
            worker,
            data,
            router_id: 9,
            lora_name: None,
        }]);
        Ok(())
    }

    fn loads(&mut self, record: &mut Record) -> Result<()> {
        let arrival = self.arrival();
        fastrand::seed(self.random.u64(..));
        let request = self.request(&arrival, ScheduleMode::QueryOnly { request_id: None });
        let mut loads = self.scheduler.get_potential_loads(
            request.token_seq,
            request.isl_tokens,
            request.overlap.effective_cached_tokens,
            self.role != WorkerType::Decode,
        );
        loads.sort_by_key(|load| (load.worker_id, load.dp_rank));
        record.line("projection", loads)
    }

    fn any_rank(&mut self) -> WorkerWithDpRank {
        let ranks = self.ranks();
        *self.random.choice(&ranks).unwrap_or(&ranks[0])
    }

    /// All ranks of the pool, which never is empty, in order.
    fn ranks(&self) -> Vec<WorkerWithDpRank> {
        let mut ranks: Vec<_> = self
            .pool
            .borrow()
            .iter()
            .flat_map(|(id, worker)| {
                (0..worker.ranks).map(move |rank| WorkerWithDpRank::new(*id, rank))
            })
            .collect();
        ranks.sort();
        ranks
    }
}

fn worker(id: WorkerId, random: &mut fastrand::Rng) -> Worker {
    let zone = if id.is_multiple_of(2) {
        "zone=a"
    } else {
        "zone=b"
    };
    Worker {
        ranks: random.u32(1..=2),
        batched_tokens: Some(2048),
        taints: HashSet::from([zone.to_owned()]),
    }
}

fn tokens(count: usize, random: &mut fastrand::Rng) -> Vec<u32> {
    (0..count).map(|_| random.u32(3..30_000)).collect()
}

fn outcome(scheduled: &Scheduled) -> Value {
    match scheduled {
        Ok(response) => json!([
            response.best_worker,
            response.effective_overlap_blocks,
            response.cached_tokens,
            response.max_raw_cached_tokens,
            response.selected_raw_cached_tokens,
            format!("{:?}", response.selected_worker_tiers),
            response.target_cached_prefix_blocks,
            response.potential_decode_blocks,
        ]),
        Err(error) => json!(["refused", error.to_string()]),
    }
}

fn outcome_of_step<E: std::fmt::Display>(result: Result<(), E>) -> Value {
    result.map_or_else(|error| error.to_string().into(), |()| Value::Null)
}
