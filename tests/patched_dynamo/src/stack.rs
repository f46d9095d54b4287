// SPDX-License-Identifier: Apache-2.0

//! Requests over HTTP through a whole frontend: what each worker is sent, what the frontend tells
//! its replicas, which KV events it subscribes to, what it puts into discovery.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use dynamo_kv_router::protocols::{
    ActiveSequenceEvent, ActiveSequenceEventBatch, ActiveSequenceEventData,
};
use dynamo_llm::entrypoint::RouterConfig;
use dynamo_llm::kv_router::ACTIVE_SEQUENCES_SUBJECT;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::pipeline::RouterMode;
use dynamo_runtime::transports::event_plane::EventSubscriber;
use dynamo_runtime::{DistributedRuntime, Runtime};
use kvdelta_recorder::deployment::{distributed, free_port, serve};
use kvdelta_recorder::settings::Settings;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::names::Names;
use crate::record::Record;
use crate::worker::{
    BLOCK_TOKENS, HELD_IN_DECODE, HELD_IN_PREFILL, Seen, Worker, endpoint, prompt,
};

const PREFILL_WORKERS: usize = 3;
const DECODE_WORKERS: usize = 3;
const STEPS: usize = 90;
const PREFIXES: usize = 5;
/// Equal costs are settled by a draw, so there must be none. Loads of decode workers are sums of
/// different powers of two, in blocks; those of prefill workers differ by parts of a block.
const PREFILL_LOADS_TOKENS: [usize; PREFILL_WORKERS] = [1, 19, 46];
const DECODE_LOADS_BLOCKS: [u32; DECODE_WORKERS] = [0, 1, 2];
const HELD_BLOCKS: std::ops::Range<u32> = 3..8;

const LIMIT: Duration = Duration::from_secs(60);
/// KV events are published without an answer.
const UNTIL_INDEXED: Duration = Duration::from_millis(200);
/// Fields whose value is a time or a random number.
const VARYING: [&str; 5] = [
    "created",
    "request_timestamp_ms",
    "handoff_id",
    "bootstrap_room",
    "traceparent",
];

/// How the frontend routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Routing {
    /// As by default.
    Plain,
    /// With conditional disaggregation.
    Conditional,
    /// With session affinity.
    Sessions,
}

/// Records a stream of requests.
pub(crate) fn record(
    settings: &Settings,
    routing: Routing,
    model: &Path,
    seed: u64,
    record: &mut Record,
) -> Result<()> {
    let subscriptions = Subscriptions::default();
    tracing_subscriber::registry()
        .with(subscriptions.clone())
        .try_init()?;
    let runtime = Runtime::from_settings()?;
    runtime.primary().block_on(async {
        let mut stack = Stack::start(settings, routing, &runtime, model, seed).await?;
        stack.run(record).await?;
        stack.end(&subscriptions, record)
    })
}

/// What the router logs about KV events, the one place where it says so.
#[derive(Clone, Debug, Default)]
struct Subscriptions(Arc<Mutex<Vec<String>>>);

#[derive(Default)]
struct Fields(BTreeMap<String, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Subscriptions {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if !event
            .metadata()
            .target()
            .starts_with("dynamo_llm::kv_router")
        {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let message = fields.0.get("message").map_or("", String::as_str);
        if message.contains("KV event subscription") || message.contains("KV event ingress") {
            let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            seen.push(format!("{:?}", fields.0));
        }
    }
}

/// A deployment in this process: workers, a frontend, and a replica that only listens.
struct Stack {
    random: fastrand::Rng,
    names: Names,
    folder: tempfile::TempDir,
    workers: Vec<Worker>,
    seen: mpsc::UnboundedReceiver<Seen>,
    release: watch::Sender<BTreeSet<u32>>,
    events: mpsc::UnboundedReceiver<(WorkerType, ActiveSequenceEvent)>,
    client: reqwest::Client,
    address: String,
    prefixes: Vec<Vec<u32>>,
    requests: usize,
    held: Vec<Held>,
    routing: Routing,
}

/// What an event says of the load of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Booking {
    In,
    Out,
}

impl Booking {
    fn of(event: &ActiveSequenceEvent) -> Option<Self> {
        match event.data {
            ActiveSequenceEventData::AddRequest { .. } => Some(Self::In),
            ActiveSequenceEventData::Free => Some(Self::Out),
            ActiveSequenceEventData::MarkPrefillCompleted => None,
        }
    }
}

/// A request that a decode worker does not answer yet.
struct Held {
    number: u32,
    id: String,
    answer: JoinHandle<Result<Value>>,
}

/// What a request asks for besides its prompt.
#[derive(Default)]
struct Asks {
    headers: Vec<(&'static str, String)>,
    extra_fields: bool,
}

impl Stack {
    async fn start(
        settings: &Settings,
        routing: Routing,
        runtime: &Runtime,
        model: &Path,
        seed: u64,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (saw, seen) = mpsc::unbounded_channel();
        let (release, released) = watch::channel(BTreeSet::new());
        let mut names = Names::default();
        names.text(model.display().to_string(), "model");
        let mut workers = Vec::new();
        for (role, count) in [
            (WorkerType::Prefill, PREFILL_WORKERS),
            (WorkerType::Decode, DECODE_WORKERS),
        ] {
            for number in 0..count {
                let worker = Worker::start(
                    distributed(runtime, folder.path()).await?,
                    role,
                    number,
                    model,
                    saw.clone(),
                    released.clone(),
                )
                .await?;
                names.number(worker.id, &worker.name);
                workers.push(worker);
            }
        }
        let replica = distributed(runtime, folder.path()).await?;
        names.number(replica.connection_id(), "replica");
        let events = listen(&replica).await?;

        let frontend = distributed(runtime, folder.path()).await?;
        names.number(frontend.connection_id(), "frontend");
        let port = free_port()?;
        serve(frontend, router(settings, routing), None, port).await?;
        Ok(Self {
            random: fastrand::Rng::with_seed(seed),
            names,
            folder,
            workers,
            seen,
            release,
            events,
            client: reqwest::Client::new(),
            address: format!("http://127.0.0.1:{port}"),
            prefixes: Vec::new(),
            requests: 0,
            held: Vec::new(),
            routing,
        })
    }

    async fn run(&mut self, record: &mut Record) -> Result<()> {
        self.wait_until_served().await?;
        for _ in 0..PREFIXES {
            let blocks = self.random.usize(6..40);
            let prefix = self.tokens(blocks * BLOCK_TOKENS as usize);
            self.prefixes.push(prefix);
        }
        self.load_workers(record).await?;
        for step in 0..STEPS {
            let held = self.held.len();
            match self.random.usize(0..100) {
                0..20 if held < HELD_BLOCKS.len() => self.hold(record).await?,
                20..35 if held > 0 => self.release_one(record).await?,
                _ => self.ask(step, record).await?,
            }
        }
        while !self.held.is_empty() {
            self.release_one(record).await?;
        }
        Ok(())
    }

    /// Ends the deployment and records what is left to say.
    fn end(self, subscriptions: &Subscriptions, record: &mut Record) -> Result<()> {
        let mut seen = subscriptions
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        seen.sort();
        for subscription in seen {
            record.line("subscription", self.names.in_text(&subscription))?;
        }
        let mut keys = Vec::new();
        collect_keys(self.folder.path(), self.folder.path(), &mut keys)?;
        for key in &mut keys {
            *key = without_drawn_numbers(&self.names.in_text(key));
        }
        keys.sort();
        for key in keys {
            record.line("discovery", key)?;
        }
        for worker in &self.workers {
            worker.stop();
        }
        Ok(())
    }

    /// Asks until the frontend has found all workers and the replica hears of both pools.
    async fn wait_until_served(&mut self) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        let mut heard = BTreeSet::new();
        let mut reached = BTreeSet::new();
        let mut last = String::new();
        while heard.len() < 2 || reached.len() < self.workers.len() {
            ensure!(
                Instant::now() < deadline,
                "after {LIMIT:?} the frontend served {reached:?}, the replica heard of {heard:?}; \
                 last answer: {last}"
            );
            for number in 0..DECODE_WORKERS {
                let asks = Asks {
                    headers: self.pins(Some(number), Some(number)),
                    ..Asks::default()
                };
                // No draw: how often it asks differs.
                match self.post(vec![100, 101, 102], asks).await? {
                    Ok(_) => {}
                    Err(error) => last = error.to_string(),
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            while let Ok(seen) = self.seen.try_recv() {
                reached.insert(seen.worker);
            }
            while let Ok((role, _)) = self.events.try_recv() {
                heard.insert(role.as_str());
            }
        }
        // Prefill workers come first. Without a weight decode has an index only then.
        let indexed = match self.routing {
            Routing::Conditional => self.workers.len(),
            Routing::Plain | Routing::Sessions => PREFILL_WORKERS,
        };
        for index in 0..indexed {
            while !self.is_heard(index).await? {
                ensure!(
                    Instant::now() < deadline,
                    "after {LIMIT:?} the frontend has no block of {}",
                    self.workers[index].name
                );
            }
        }
        // What came late of the last answers.
        tokio::time::sleep(Duration::from_millis(500)).await;
        self.forget();
        Ok(())
    }

    /// Forgets what workers and replica have heard.
    fn forget(&mut self) {
        while self.seen.try_recv().is_ok() {}
        while self.events.try_recv().is_ok() {}
    }

    /// Whether the frontend routes by the blocks that a worker publishes; it subscribes to each at a
    /// time of its own.
    async fn is_heard(&mut self, index: usize) -> Result<bool> {
        self.forget();
        let worker = &self.workers[index];
        let (role, name, id) = (worker.role, worker.name.clone(), worker.id);
        // Nobody else has these blocks, and no draw makes them. The token behind them is to be computed.
        let first = 100 + 200 * index as u32;
        let prompt: Vec<u32> = (first..=first + 10 * BLOCK_TOKENS).collect();
        worker.store(&prompt)?;
        tokio::time::sleep(UNTIL_INDEXED).await;
        if self.post(prompt.clone(), Asks::default()).await?.is_err() {
            return Ok(false);
        }
        tokio::time::sleep(UNTIL_INDEXED).await;
        if role == WorkerType::Decode {
            // Its prompt is computed where it is, without a prefill worker.
            let seen: Vec<_> = std::iter::from_fn(|| self.seen.try_recv().ok()).collect();
            return Ok(seen.len() == 1 && seen[0].worker == name);
        }
        let is_short = |event: ActiveSequenceEvent| match event.data {
            ActiveSequenceEventData::AddRequest {
                prefill_load_hint: Some(hint),
                ..
            } => {
                event.worker.worker_id == id && hint.initial_effective_prefill_tokens < prompt.len()
            }
            _ => false,
        };
        let mut events = std::iter::from_fn(|| self.events.try_recv().ok());
        Ok(events.any(|(_, event)| is_short(event)))
    }

    /// Gives every worker a load of its own that stays.
    async fn load_workers(&mut self, record: &mut Record) -> Result<()> {
        for (number, tokens) in PREFILL_LOADS_TOKENS.into_iter().enumerate() {
            let mut prompt = self.tokens(tokens - 1);
            prompt.push(HELD_IN_PREFILL + number as u32);
            let asks = Asks {
                headers: self.pins(Some(number), None),
                ..Asks::default()
            };
            let mut answer = self.send(prompt, asks);
            self.next_of(WorkerType::Prefill, &mut answer, record)
                .await?;
        }
        for (number, power) in DECODE_LOADS_BLOCKS.into_iter().enumerate() {
            let mut prompt = self.tokens((BLOCK_TOKENS << power) as usize);
            prompt.push(HELD_IN_DECODE + number as u32);
            let asks = Asks {
                headers: self.pins(Some(number), Some(number)),
                ..Asks::default()
            };
            let mut answer = self.send(prompt, asks);
            self.next_of(WorkerType::Decode, &mut answer, record)
                .await?;
        }
        Ok(())
    }

    /// A request that is answered at once.
    async fn ask(&mut self, step: usize, record: &mut Record) -> Result<()> {
        let prompt = self.prompt(60);
        let mut asks = Asks {
            extra_fields: step.is_multiple_of(2),
            ..Asks::default()
        };
        let (some_prefill, some_decode) = (
            self.random.usize(..PREFILL_WORKERS),
            self.random.usize(..DECODE_WORKERS),
        );
        match self.random.usize(0..100) {
            0..8 => asks.headers = self.pins(None, Some(some_decode)),
            8..16 => asks.headers = self.pins(Some(some_prefill), None),
            16..20 => asks.headers = self.pins(Some(some_prefill), Some(some_decode)),
            20..28 => asks
                .headers
                .push(("x-dynamo-request-priority", "3".to_owned())),
            28..60 if self.routing == Routing::Sessions => {
                let session = format!("session-{}", self.random.usize(..4));
                asks.headers.push(("x-dynamo-session-id", session));
            }
            _ => {}
        }
        match self.post(prompt, asks).await? {
            Ok(answer) => {
                self.settle(record).await?;
                record.line("answer", self.named(&answer))
            }
            // A refusal is an outcome too, such as that of a decode worker pinned alone.
            Err(error) => record.line("answer", self.names.in_text(&error.to_string())),
        }
    }

    /// A request that its decode worker keeps.
    async fn hold(&mut self, record: &mut Record) -> Result<()> {
        let free = HELD_BLOCKS
            .map(|power| HELD_IN_DECODE + power)
            .find(|number| self.held.iter().all(|held| held.number != *number))
            .context("every size is held already")?;
        let tokens = (BLOCK_TOKENS << (free - HELD_IN_DECODE)) as usize;
        let mut prompt = self.prompt(60);
        prompt.truncate(tokens);
        let rest = self.tokens(tokens - prompt.len());
        prompt.extend(rest);
        prompt.push(free);
        let mut answer = self.send(prompt, Asks::default());
        let id = self
            .next_of(WorkerType::Decode, &mut answer, record)
            .await?;
        self.held.push(Held {
            number: free,
            id,
            answer,
        });
        Ok(())
    }

    /// Lets a decode worker answer a request that it kept.
    async fn release_one(&mut self, record: &mut Record) -> Result<()> {
        let held = self.held.remove(self.random.usize(..self.held.len()));
        self.release.send_modify(|released| {
            released.insert(held.number);
        });
        let answer = held.answer.await??;
        let events = self
            .events_until(&[(WorkerType::Decode, Booking::Out, 1)])
            .await?;
        ensure!(
            events.iter().all(|(_, event)| event.request_id == held.id),
            "the frontend told of others than the released request: {events:?}"
        );
        self.write_events(events, record)?;
        self.release.send_modify(|released| {
            released.remove(&held.number);
        });
        record.line("answer", self.named(&answer))
    }

    /// Waits until a worker of the role holds the request that `answer` is for; its id.
    async fn next_of(
        &mut self,
        role: WorkerType,
        answer: &mut JoinHandle<Result<Value>>,
        record: &mut Record,
    ) -> Result<String> {
        let mut prefills = 0;
        loop {
            let seen = tokio::select! {
                seen = self.seen.recv() => seen.context("the workers ended")?,
                answer = &mut *answer => {
                    let answer = answer?.context("a request to be held was refused")?;
                    bail!("a request to be held was answered: {answer}");
                }
                () = tokio::time::sleep(LIMIT) => bail!("no worker got a request to be held"),
            };
            let reached = seen.worker.starts_with(role.as_str());
            prefills += usize::from(seen.worker.starts_with(WorkerType::Prefill.as_str()));
            self.sent(seen, record)?;
            if reached {
                break;
            }
        }
        let handed_over = match role {
            WorkerType::Prefill => 0,
            _ => prefills,
        };
        let events = self
            .events_until(&[
                (role, Booking::In, 1),
                (WorkerType::Prefill, Booking::Out, handed_over),
            ])
            .await?;
        let id = events
            .iter()
            .rfind(|(of, event)| *of == role && Booking::of(event) == Some(Booking::In))
            .map(|(_, event)| event.request_id.clone())
            .context("a held request was not booked")?;
        self.write_events(events, record)?;
        tokio::time::sleep(UNTIL_INDEXED).await;
        Ok(id)
    }

    /// Waits until the request that was answered is booked out, and records its way.
    async fn settle(&mut self, record: &mut Record) -> Result<()> {
        let mut prefills = 0;
        while let Ok(seen) = self.seen.try_recv() {
            prefills += usize::from(seen.worker.starts_with(WorkerType::Prefill.as_str()));
            self.sent(seen, record)?;
        }
        let events = self
            .events_until(&[
                (WorkerType::Prefill, Booking::Out, prefills),
                (WorkerType::Decode, Booking::Out, 1),
            ])
            .await?;
        self.write_events(events, record)?;
        tokio::time::sleep(UNTIL_INDEXED).await;
        Ok(())
    }

    /// Events until there were as many of each booking as said. Nothing of a request comes after
    /// its last booking.
    async fn events_until(
        &mut self,
        all: &[(WorkerType, Booking, usize)],
    ) -> Result<Vec<(WorkerType, ActiveSequenceEvent)>> {
        let mut events: Vec<(WorkerType, ActiveSequenceEvent)> = Vec::new();
        let missing = |events: &[(WorkerType, ActiveSequenceEvent)]| {
            all.iter().any(|(role, booking, count)| {
                let found = events
                    .iter()
                    .filter(|(of, event)| of == role && Booking::of(event) == Some(*booking))
                    .count();
                found < *count
            })
        };
        while missing(&events) {
            events.push(self.event().await?);
        }
        Ok(events)
    }

    /// Records a request as a worker got it; the worker then has its blocks.
    fn sent(&mut self, seen: Seen, record: &mut Record) -> Result<()> {
        record.line("choice", &seen.worker)?;
        let request = self.names.in_value(&seen.request, &VARYING);
        record.line("request", json!([seen.worker, request]))?;
        let worker = self
            .workers
            .iter()
            .find(|worker| worker.name == seen.worker)
            .context("an unknown worker got a request")?;
        worker.store(&prompt(&seen.request)?)
    }

    async fn event(&mut self) -> Result<(WorkerType, ActiveSequenceEvent)> {
        tokio::time::timeout(LIMIT, self.events.recv())
            .await
            .context("the frontend told its replicas nothing")?
            .context("the replica ended")
    }

    /// Records events by pool: their order between pools is that of two sockets.
    fn write_events(
        &mut self,
        mut events: Vec<(WorkerType, ActiveSequenceEvent)>,
        record: &mut Record,
    ) -> Result<()> {
        events.sort_by_key(|(role, _)| *role != WorkerType::Prefill);
        for (role, event) in events {
            record.line("event", self.event_line(role, &event)?)?;
        }
        Ok(())
    }

    /// An event with names in it. Requests are named in the order in which they are first told of.
    fn event_line(&mut self, role: WorkerType, event: &ActiveSequenceEvent) -> Result<Value> {
        let named = self.names.in_text(&event.request_id);
        if named == event.request_id {
            self.requests += 1;
            let name = format!("request {}", self.requests);
            self.names.text(&event.request_id, name);
        }
        let mut value = self.names.in_value(&serde_json::to_value(event)?, &VARYING);
        // Where reuse is not assumed the hashes are random: their number is what counts.
        if role == WorkerType::Decode
            && let Some(hashes) = value.pointer_mut("/data/AddRequest/token_sequence")
            && let Some(blocks) = hashes.as_array().map(Vec::len)
        {
            *hashes = format!("<{blocks} random hashes>").into();
        }
        Ok(json!([role, value]))
    }

    fn named(&self, answer: &Value) -> Value {
        let mut answer = self.names.in_value(answer, &VARYING);
        if let Some(id) = answer.get_mut("id") {
            *id = "<id>".into();
        }
        answer
    }

    fn pins(&self, prefill: Option<usize>, decode: Option<usize>) -> Vec<(&'static str, String)> {
        let id = |role: WorkerType, number: usize| {
            let name = format!("{} {number}", role.as_str());
            let worker = self.workers.iter().find(|worker| worker.name == name);
            worker.map(|worker| worker.id.to_string())
        };
        let prefill = prefill.and_then(|number| id(WorkerType::Prefill, number));
        let decode = decode.and_then(|number| id(WorkerType::Decode, number));
        prefill
            .map(|id| ("x-dynamo-prefill-instance-id", id))
            .into_iter()
            .chain(decode.map(|id| ("x-dynamo-worker-instance-id", id)))
            .collect()
    }

    /// Sends a request whose answer is not waited for.
    fn send(&self, prompt: Vec<u32>, asks: Asks) -> JoinHandle<Result<Value>> {
        let answer = self.post(prompt, asks);
        tokio::spawn(async move { answer.await? })
    }

    /// Sends a request; the outer error says that the frontend cannot be reached.
    fn post(
        &self,
        prompt: Vec<u32>,
        asks: Asks,
    ) -> impl Future<Output = Result<Result<Value>>> + Send + 'static {
        let mut body = json!({
            "model": "recorded",
            "prompt": prompt,
            "max_tokens": 3,
            "stream": false,
        });
        if asks.extra_fields {
            body["nvext"] = json!({ "extra_fields": ["worker_id"] });
        }
        let mut post = self
            .client
            .post(format!("{}/v1/completions", self.address))
            .json(&body);
        for (name, value) in asks.headers {
            post = post.header(name, value);
        }
        async move {
            let Ok(answer) = post.send().await else {
                return Ok(Err(anyhow::anyhow!("no frontend listens yet")));
            };
            let status = answer.status();
            let text = answer.text().await?;
            if !status.is_success() {
                return Ok(Err(anyhow::anyhow!("{status}: {text}")));
            }
            Ok(Ok(serde_json::from_str(&text)?))
        }
    }

    /// A prompt that begins like others.
    fn prompt(&mut self, most: usize) -> Vec<u32> {
        let prefix = self.random.choice(&self.prefixes).cloned();
        let mut prompt = prefix.unwrap_or_default();
        let rest = self.random.usize(1..most);
        prompt.extend(self.tokens(rest));
        prompt
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count)
            .map(|_| self.random.u32(100..HELD_IN_DECODE))
            .collect()
    }
}

fn router(settings: &Settings, routing: Routing) -> RouterConfig {
    let mut config = settings.config();
    config.router_replica_sync = true;
    if routing == Routing::Conditional {
        config.conditional_disagg_enabled = true;
        config.conditional_disagg_eff_isl_threshold = 24;
        config.conditional_disagg_eff_isl_ratio_threshold = 0.9;
        // Decode workers are compared by overlap too, which whole numbers would let be equal.
        config.overlap_score_credit = 0.8713;
    }
    let mut router = RouterConfig::new(RouterMode::KV, config);
    if routing == Routing::Sessions {
        router.session_affinity_ttl_secs = Some(600);
    }
    router
}

/// Listens as another frontend would.
async fn listen(
    replica: &DistributedRuntime,
) -> Result<mpsc::UnboundedReceiver<(WorkerType, ActiveSequenceEvent)>> {
    let (heard, events) = mpsc::unbounded_channel();
    for role in [WorkerType::Prefill, WorkerType::Decode] {
        let endpoint = endpoint(replica, role)?;
        let mut batches = EventSubscriber::for_endpoint(&endpoint, ACTIVE_SEQUENCES_SUBJECT)
            .await?
            .typed::<ActiveSequenceEventBatch>();
        let heard = heard.clone();
        tokio::spawn(async move {
            while let Some(Ok((_, batch))) = batches.next().await {
                for event in batch.events {
                    if heard.send((role, event)).is_err() {
                        return;
                    }
                }
            }
        });
    }
    Ok(events)
}

/// The names of all files below `folder`.
fn collect_keys(root: &Path, folder: &Path, keys: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect_keys(root, &path, keys)?;
        } else {
            keys.push(path.strip_prefix(root)?.display().to_string());
        }
    }
    Ok(())
}

/// A key of discovery, readable, with `<id>` in place of each number that Dynamo drew.
fn without_drawn_numbers(key: &str) -> String {
    key.replace("%2F", "/")
        .replace("%5F", "_")
        .replace("%2D", "-")
        .split_inclusive(['/', '_', '-'])
        .map(|part| {
            let word = part.trim_end_matches(['/', '_', '-']);
            let drawn = word.len() >= 10 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
            if drawn {
                format!("<id>{}", &part[word.len()..])
            } else {
                part.to_owned()
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_numbers_in_keys_are_told_from_words() {
        assert_eq!(
            without_drawn_numbers(
                "v1/instances/recorded%2Fdecode%2Fkv%5Fquery%5F10ac6aad29d102%2F<decode 0>"
            ),
            "v1/instances/recorded/decode/kv_query_<id>/<decode 0>"
        );
        let plain = "v1/event_channels/topic/active_sequences_events/decode/feed";
        assert_eq!(without_drawn_numbers(plain), plain);
    }
}
