// SPDX-License-Identifier: Apache-2.0

//! The index fed by a real vLLM and, over a real NATS server, by a real Dynamo worker.
//!
//! An index that followed the live events must be the one that somebody builds who comes later and has
//! only the replay (vLLM) or the dump (Dynamo): before and after eviction, reset, a forced gap and a
//! restart of the engine.

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use kvdelta_indexer::feed::nats::{Credentials, NatsFeed, Scope};
use kvdelta_indexer::feed::zmq::{EngineFeed, Timing};
use kvdelta_indexer::feed::{
    Admission, Answer, Control, FeedId, Follower, Limits, LocalIndexers, Origin, RecoverError,
    Settings, Signal, Source, Tap, queue,
};
use kvdelta_indexer::{BlockSize, Dialect, DpRank, Held, Index, Link, Trust, WorkerId, WorkerRank};
use nix::sys::signal::Signal as UnixSignal;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::cache::Cache;
use crate::client::Client;
use crate::env;
use crate::fleet::{
    self, BLOCK_SIZE, ENGINE_OPTIONS, MODEL, Process, START_TIMEOUT, api_server,
    engine_environment, kv_events,
};
use crate::frontend;
use crate::interrupt;
use crate::ports::free_ports;
use crate::progress::{Step, say};

/// Blocks of the engines' KV caches, and bytes of one block of the test model.
const CACHE_BLOCKS: usize = 64;
const BLOCK_BYTES: usize = 128 << 10;
/// Blocks of one prompt, besides a token behind them.
const PROMPT_BLOCKS: usize = 8;
/// By when live and late index have to be equal; a busy machine needs seconds.
const AGREE_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

/// The part of `cargo xtask test`.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let python = env::engines(cache)?;
    let parts = Parts {
        model: env::model(cache, &python)?,
        nats: env::nats_server(cache)?,
        client: frontend::example(cache, "worker_client")?,
        python,
    };
    fleet::check_memory(2)?;
    interrupt::run(cache, "live-index", async |folder| {
        scenarios(&parts, folder).await
    })
}

/// What the test runs.
struct Parts {
    python: PathBuf,
    model: PathBuf,
    nats: PathBuf,
    client: PathBuf,
}

/// Both engines start side by side: most of the time is theirs.
async fn scenarios(parts: &Parts, folder: &Path) -> Result<()> {
    let mut vllm = Vllm::start(parts, folder)?;
    let mut dynamo = DynamoWorker::start(parts, folder)?;
    vllm.ready().await?;
    let replayed = vllm.follow()?;
    events(&mut vllm, &replayed).await.context("vLLM")?;
    dynamo.ready().await?;
    let dumped = dynamo.follow()?;
    events(&mut dynamo, &dumped).await.context("Dynamo")?;
    for engine in [&mut vllm as &mut dyn Engine, &mut dynamo] {
        engine.restart()?;
    }
    vllm.ready().await?;
    restarted(&mut vllm, &replayed).await.context("vLLM")?;
    // What discovery tells a router.
    dumped.following.control.remove(dynamo.of.worker).await;
    dynamo.ready().await?;
    restarted(&mut dynamo, &dumped).await.context("Dynamo")
}

/// What both engines can be told to do.
trait Engine {
    fn name(&self) -> &'static str;
    /// Whose events.
    fn of(&self) -> WorkerRank;
    /// Computes the prompt, so that its blocks are cached.
    fn compute<'a>(&'a mut self, prompt: &'a [u32]) -> BoxFuture<'a, Result<()>>;
    fn reset(&mut self) -> BoxFuture<'_, Result<()>>;
    /// Kills it and starts it again; `ready` comes later.
    fn restart(&mut self) -> Result<()>;
    /// A source of its events for somebody who comes late.
    fn source(&self) -> Result<Arc<dyn Source>>;
}

/// An index that follows, until it is dropped.
struct Following {
    index: Arc<Index>,
    control: Control,
    task: JoinHandle<()>,
}

impl Following {
    fn start() -> Result<Self> {
        let size = BlockSize::try_from(u32::try_from(BLOCK_SIZE)?)?;
        let index = Arc::new(Index::new(size));
        let (follower, control) = Follower::new(Arc::clone(&index), Settings::default());
        let task = tokio::spawn(follower.run());
        Ok(Self {
            index,
            control,
            task,
        })
    }

    fn is_complete(&self, of: WorkerRank) -> bool {
        let standing = self.control.trust().standing(of, self.control.now());
        standing.is_some_and(|standing| standing.trust == Trust::Complete)
    }

    fn shown(&self, of: WorkerRank) -> String {
        let standing = self.control.trust().standing(of, self.control.now());
        format!("{} blocks, {standing:?}", self.index.held(of).len())
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The index that hears everything as it happens.
struct Live {
    following: Following,
    /// While this is set, what the socket brings is thrown away.
    deaf: Arc<AtomicBool>,
}

impl Live {
    fn start(source: Arc<dyn Source>, admission: Admission) -> Result<Self> {
        let following = Following::start()?;
        let deaf = Arc::new(AtomicBool::new(false));
        let lossy = Lossy {
            source,
            deaf: Arc::clone(&deaf),
        };
        following.control.follow(Arc::new(lossy), admission);
        Ok(Self { following, deaf })
    }
}

/// A source whose live messages can be lost.
struct Lossy {
    source: Arc<dyn Source>,
    deaf: Arc<AtomicBool>,
}

impl Source for Lossy {
    fn name(&self) -> String {
        self.source.name()
    }

    fn origin(&self) -> Origin {
        self.source.origin()
    }

    fn link(&self) -> Link {
        self.source.link()
    }

    fn listen(&self, mut tap: Tap) -> BoxFuture<'_, ()> {
        let (inlet, mut heard) = queue(Limits::default());
        let inner = self.source.listen(inlet.tap(FeedId(0)));
        let forward = async move {
            while let Some(heard) = heard.next().await {
                match heard.signal {
                    Signal::Frame(_) if self.deaf.load(Ordering::Relaxed) => {}
                    Signal::Frame(frame) => tap.offer(frame),
                    other => {
                        if !tap.tell(other).await {
                            return;
                        }
                    }
                }
            }
        };
        Box::pin(async move {
            tokio::select! {
                () = inner => {}
                () = forward => {}
            }
        })
    }

    fn replay(&self, of: WorkerRank, from_seq: u64) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        self.source.replay(of, from_seq)
    }

    fn dump(&self, of: WorkerRank) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        self.source.dump(of)
    }
}

/// Compares with an index that comes now and learns all by replay or dump; returns what both hold.
async fn agree(what: &str, engine: &dyn Engine, live: &Live) -> Result<Vec<Held>> {
    let of = engine.of();
    let late = Following::start()?;
    let source = engine.source()?;
    let is_shared = source.origin() == Origin::All;
    late.control.follow(source, Admission::Named);
    if is_shared {
        late.control.admit(of.worker, vec![of.rank]);
    }
    let deadline = Instant::now() + AGREE_TIMEOUT;
    loop {
        let (by_events, at_once) = (live.following.index.held(of), late.index.held(of));
        let complete = live.following.is_complete(of) && late.is_complete(of);
        if complete && !by_events.is_empty() && by_events == at_once {
            say(format!(
                "{}, {what}: {} blocks, equal",
                engine.name(),
                at_once.len()
            ));
            return Ok(by_events);
        }
        if Instant::now() > deadline {
            bail!(
                "{what}: by live events {}; by what is asked for {}\n{}",
                live.following.shown(of),
                late.shown(of),
                live.following
                    .control
                    .counters()
                    .render(live.following.control.trust(), live.following.control.now())
            );
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Prompt `number`, of blocks that no other has, and one token more.
fn prompt(number: usize) -> Vec<u32> {
    let tokens = PROMPT_BLOCKS * BLOCK_SIZE + 1;
    let mut random = fastrand::Rng::with_seed(number as u64);
    (0..tokens).map(|_| random.u32(100..4000)).collect()
}

/// Blocks before eviction, after it, after a reset and after a gap.
async fn events(engine: &mut dyn Engine, live: &Live) -> Result<()> {
    for number in 0..3 {
        engine.compute(&prompt(number)).await?;
    }
    let few = agree("before eviction", engine, live).await?;
    ensure!(
        few.len() == 3 * PROMPT_BLOCKS,
        "three prompts left {} blocks",
        few.len()
    );
    for number in 3..12 {
        engine.compute(&prompt(number)).await?;
    }
    let full = agree("after eviction", engine, live).await?;
    ensure!(full.len() <= CACHE_BLOCKS, "{} blocks", full.len());
    let kept: HashSet<&Held> = full.iter().collect();
    ensure!(
        few.iter().any(|held| !kept.contains(held)),
        "nothing was evicted"
    );

    live.deaf.store(true, Ordering::Relaxed);
    engine.compute(&prompt(20)).await?;
    // The engine's events are on their way a little longer than its answer.
    tokio::time::sleep(Duration::from_secs(1)).await;
    live.deaf.store(false, Ordering::Relaxed);
    engine.compute(&prompt(21)).await?;
    let after = agree("after a gap", engine, live).await?;
    ensure!(after != full, "the gap held nothing");
    let counts = live
        .following
        .control
        .counters()
        .render(live.following.control.trust(), live.following.control.now());
    ensure!(
        counts
            .lines()
            .any(|line| line.starts_with("dynamo_kvdelta_gaps_total ") && !line.ends_with(" 0")),
        "no gap was seen:\n{counts}"
    );

    engine.reset().await?;
    // vLLM publishes what it has to say with its next step only.
    engine.compute(&prompt(30)).await?;
    let reset = agree("after a reset", engine, live).await?;
    ensure!(
        reset.len() == PROMPT_BLOCKS,
        "a reset and a prompt left {} blocks",
        reset.len()
    );
    Ok(())
}

/// The engine started again: nothing of before is left.
async fn restarted(engine: &mut dyn Engine, live: &Live) -> Result<()> {
    engine.compute(&prompt(40)).await?;
    let held = agree("after a restart", engine, live).await?;
    ensure!(
        held.len() == PROMPT_BLOCKS,
        "a restart and a prompt left {} blocks",
        held.len()
    );
    Ok(())
}

fn small_cache(command: &mut Command) {
    let bytes = (CACHE_BLOCKS * BLOCK_BYTES).to_string();
    command.args(ENGINE_OPTIONS).args([
        "--max-model-len",
        "1024",
        "--kv-cache-memory-bytes",
        &bytes,
    ]);
}

/// vLLM alone, heard by its own ZMQ publisher.
struct Vllm<'a> {
    parts: &'a Parts,
    folder: PathBuf,
    client: Client,
    http: u16,
    publish: u16,
    replay: u16,
    process: [Process; 1],
}

impl<'a> Vllm<'a> {
    fn start(parts: &'a Parts, folder: &Path) -> Result<Self> {
        let [http, publish, replay] = free_ports()?;
        Ok(Self {
            parts,
            folder: folder.to_owned(),
            client: Client::new(MODEL)?,
            http,
            publish,
            replay,
            process: [Self::spawn(parts, folder, [http, publish, replay])?],
        })
    }

    fn spawn(parts: &Parts, folder: &Path, [http, publish, replay]: [u16; 3]) -> Result<Process> {
        let mut command = api_server(&parts.python, &parts.model, http);
        command
            .args(["--kv-events-config", &kv_events(publish, replay)])
            .env("VLLM_SERVER_DEV_MODE", "1");
        small_cache(&mut command);
        Process::spawn("vllm", command, folder)
    }

    fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.http)
    }

    async fn ready(&mut self) -> Result<()> {
        let mut step = Step::begin("vLLM");
        let deadline = Instant::now() + START_TIMEOUT;
        let health = format!("{}/health", self.base());
        while self.client.get(&health).await.is_err() {
            self.process[0].check_start()?;
            ensure!(Instant::now() < deadline, "vLLM is not up");
            step.tick("");
            tokio::time::sleep(POLL).await;
        }
        step.end();
        Ok(())
    }

    fn follow(&self) -> Result<Live> {
        Live::start(self.source()?, Admission::Named)
    }
}

impl Engine for Vllm<'_> {
    fn name(&self) -> &'static str {
        "vLLM"
    }

    fn of(&self) -> WorkerRank {
        WorkerRank::new(1, 0)
    }

    fn compute<'a>(&'a mut self, prompt: &'a [u32]) -> BoxFuture<'a, Result<()>> {
        let base = self.base();
        Box::pin(async move { self.client.complete(&base, prompt, 1).await.map(drop) })
    }

    fn reset(&mut self) -> BoxFuture<'_, Result<()>> {
        let url = format!("{}/reset_prefix_cache", self.base());
        Box::pin(async move { self.client.send(&url, &json!({})).await.map(drop) })
    }

    fn restart(&mut self) -> Result<()> {
        self.process[0].signal(UnixSignal::SIGKILL);
        fleet::stop(&mut self.process);
        let ports = [self.http, self.publish, self.replay];
        self.process = [Self::spawn(self.parts, &self.folder, ports)?];
        Ok(())
    }

    fn source(&self) -> Result<Arc<dyn Source>> {
        let [publisher, replay] =
            [self.publish, self.replay].map(|port| format!("tcp://127.0.0.1:{port}"));
        let feed = EngineFeed::new(
            self.of(),
            Dialect::Vllm,
            0,
            &publisher,
            Some(&replay),
            "",
            Timing::default(),
        )?;
        Ok(Arc::new(feed))
    }
}

impl Drop for Vllm<'_> {
    fn drop(&mut self) {
        fleet::stop(&mut self.process);
    }
}

/// A Dynamo worker with vLLM in it, heard over NATS; its local indexer is asked by Dynamo's own client.
struct DynamoWorker<'a> {
    parts: &'a Parts,
    folder: PathBuf,
    nats: u16,
    /// The broker and the worker.
    processes: Vec<Process>,
    workers: Option<Workers>,
    of: WorkerRank,
}

impl<'a> DynamoWorker<'a> {
    fn start(parts: &'a Parts, folder: &Path) -> Result<Self> {
        let [nats] = free_ports()?;
        let mut broker = Command::new(&parts.nats);
        broker.args(["--addr", "127.0.0.1", "--port", &nats.to_string()]);
        let mut worker = Self {
            parts,
            folder: folder.to_owned(),
            nats,
            processes: vec![Process::spawn("nats-server", broker, folder)?],
            workers: None,
            of: WorkerRank::new(0, 0),
        };
        worker.spawn()?;
        Ok(worker)
    }

    fn spawn(&mut self) -> Result<()> {
        let [publish, replay, system] = free_ports()?;
        let mut command = Command::new(&self.parts.python);
        command
            .args(["-m", "dynamo.vllm", "--model"])
            .arg(&self.parts.model)
            .args(["--served-model-name", MODEL])
            .args(["--kv-events-config", &kv_events(publish, replay)])
            .env("DYN_SYSTEM_PORT", system.to_string())
            .envs(engine_environment())
            .envs(self.environment());
        small_cache(&mut command);
        let process = Process::spawn("dynamo-vllm", command, &self.folder)?;
        self.processes.push(process);
        Ok(())
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let discovery = self.folder.join(fleet::DISCOVERY).display().to_string();
        vec![
            ("DYN_TCP_RPC_HOST", "127.0.0.1".to_owned()),
            ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0".to_owned()),
            ("DYN_DISCOVERY_BACKEND", "file".to_owned()),
            ("DYN_FILE_KV", discovery),
            ("DYN_REQUEST_PLANE", "tcp".to_owned()),
            ("DYN_EVENT_PLANE", "nats".to_owned()),
            ("NATS_SERVER", self.server()),
        ]
    }

    fn server(&self) -> String {
        format!("nats://127.0.0.1:{}", self.nats)
    }

    /// Waits for a worker that was not there before.
    async fn ready(&mut self) -> Result<()> {
        if self.workers.is_none() {
            fs::create_dir_all(self.folder.join(fleet::DISCOVERY))?;
            let mut command = Command::new(&self.parts.client);
            command.envs(self.environment());
            self.workers = Some(Workers::start(command, &self.folder)?);
        }
        let workers = self.workers()?;
        let mut step = Step::begin("Dynamo worker");
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            self.processes.iter_mut().try_for_each(Process::check)?;
            ensure!(Instant::now() < deadline, "the worker is not up");
            let sources = workers.ask(json!("sources")).await?;
            let sources: Vec<KvEventSource> = serde_json::from_value(sources)?;
            let found = sources.iter().find(|source| {
                source.recovery_target.is_some() && source.worker.worker_id != self.of.worker.0
            });
            if let Some(source) = found {
                self.of = WorkerRank::new(source.worker.worker_id, source.worker.dp_rank);
                let call = json!({"call": {"worker": self.of.worker.0, "endpoint": "generate",
                    "request": request(&prompt(90))}});
                // It announces its events before it takes requests.
                if workers.ask(call).await.is_ok() {
                    break;
                }
            }
            step.tick("");
            tokio::time::sleep(POLL).await;
        }
        step.end();
        self.reset().await
    }

    fn workers(&self) -> Result<Workers> {
        self.workers.clone().context("nobody was asked to be ready")
    }

    fn follow(&self) -> Result<Live> {
        Live::start(self.source()?, Admission::Heard)
    }
}

/// As `dynamo-llm` has it (`discovery/kv_source_membership.rs`).
#[derive(Deserialize)]
struct KvEventSource {
    worker: Worker,
    recovery_target: Option<Value>,
}

#[derive(Deserialize)]
struct Worker {
    worker_id: u64,
    dp_rank: u32,
}

/// A `PreprocessedRequest` for one token.
fn request(prompt: &[u32]) -> Value {
    json!({
        "model": MODEL,
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": 1, "ignore_eos": true},
        "sampling_options": {"temperature": 0.0},
        "output_options": {},
        "eos_token_ids": [],
        "annotations": [],
    })
}

impl Engine for DynamoWorker<'_> {
    fn name(&self) -> &'static str {
        "Dynamo over NATS"
    }

    fn of(&self) -> WorkerRank {
        self.of
    }

    fn compute<'a>(&'a mut self, prompt: &'a [u32]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let call = json!({"call": {"worker": self.of.worker.0, "endpoint": "generate",
                "request": request(prompt)}});
            self.workers()?.ask(call).await.map(drop)
        })
    }

    fn reset(&mut self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let call = json!({"call": {"worker": self.of.worker.0,
                "endpoint": "clear_kv_blocks", "request": {}}});
            let said = self.workers()?.ask(call).await?.to_string();
            ensure!(said.contains("success"), "clear_kv_blocks: {said}");
            Ok(())
        })
    }

    fn restart(&mut self) -> Result<()> {
        let Some(mut worker) = self.processes.pop() else {
            bail!("no worker runs");
        };
        worker.signal(UnixSignal::SIGKILL);
        fleet::stop(std::slice::from_mut(&mut worker));
        self.spawn()
    }

    fn source(&self) -> Result<Arc<dyn Source>> {
        let scope = Scope {
            namespace: Some("dynamo".to_owned()),
            ..Scope::default()
        };
        let local = Arc::new(self.workers()?);
        let feed = NatsFeed::new(&self.server(), Credentials::None, &scope, Some(local));
        Ok(Arc::new(feed))
    }
}

impl Drop for DynamoWorker<'_> {
    fn drop(&mut self) {
        fleet::stop(&mut self.processes);
    }
}

/// `tests/dynamo-frontend/examples/worker_client.rs`, running.
#[derive(Clone)]
struct Workers(Arc<Mutex<Pipes>>);

struct Pipes {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Workers {
    fn start(mut command: Command, folder: &Path) -> Result<Self> {
        let log = fs::File::create(folder.join("worker-client.log"))?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("cannot start worker_client")?;
        let to = child.stdin.take().context("no standard input")?;
        let from = child.stdout.take().context("no standard output")?;
        let from = BufReader::new(from);
        Ok(Self(Arc::new(Mutex::new(Pipes { child, to, from }))))
    }

    async fn ask(&self, command: Value) -> Result<Value> {
        let pipes = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || match pipes.lock() {
            Ok(mut pipes) => pipes.ask(&command),
            Err(_) => bail!("worker_client was left in the middle of an answer"),
        })
        .await?
    }
}

impl Pipes {
    fn ask(&mut self, command: &Value) -> Result<Value> {
        writeln!(self.to, "{command}")?;
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let mut answer: Value = serde_json::from_str(&line)
            .with_context(|| format!("worker_client answers {line:?}"))?;
        match answer.get_mut("ok") {
            Some(ok) => Ok(ok.take()),
            None => bail!("{command}: {answer}"),
        }
    }
}

impl LocalIndexers for Workers {
    fn ask(
        &self,
        of: WorkerRank,
        from_event: Option<u64>,
    ) -> BoxFuture<'_, Result<Bytes, RecoverError>> {
        Box::pin(async move {
            let WorkerRank {
                worker: WorkerId(worker),
                rank: DpRank(rank),
            } = of;
            let question = json!({"local": {"worker": worker, "rank": rank, "from": from_event}});
            let answer = Self::ask(self, question).await;
            let bytes = answer.and_then(|answer| bytes_of(answer.as_str().unwrap_or_default()));
            bytes.map_err(|error| RecoverError::Refused {
                of,
                reason: format!("{error:#}"),
            })
        })
    }
}

/// The bytes of hexadecimal digits.
fn bytes_of(digits: &str) -> Result<Bytes> {
    let pairs = (0..digits.len() / 2).map(|at| digits.get(2 * at..2 * at + 2));
    let bytes = pairs.map(|pair| Ok(u8::from_str_radix(pair.unwrap_or_default(), 16)?));
    bytes.collect()
}

impl Drop for Pipes {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
