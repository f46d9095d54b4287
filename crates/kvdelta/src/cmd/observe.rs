// SPDX-License-Identifier: Apache-2.0

//! `kvdelta observe`: follows the KV events of live workers and shows what they hold.

use std::env;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use kvdelta_indexer::feed::nats::{Credentials, NatsFeed, Scope};
use kvdelta_indexer::feed::zmq::{EngineFeed, PublisherFeed, Timing};
use kvdelta_indexer::feed::{Admission, Control, Follower, Settings};
use kvdelta_indexer::{
    BlockSize, DpRank, Index, Reason, Standing, Trust, WorkerId, WorkerRank, namespace,
};
use reqwest::blocking::Client;
use tokio::runtime::Runtime;

use crate::doctor::discovery::Wanted;
use crate::doctor::http;
use crate::doctor::store::{Store, address};
use crate::observe::fleet::{Channel, Fleet};
use crate::observe::prompt;
use crate::observe::reading::{Names, Reader};
use crate::observe::snapshot::Snapshot;
use crate::observe::table;
use crate::observe::worker::{Worker, check_distinct};
use crate::render::{print, say};

/// How often discovery is read again.
const REREAD: Duration = Duration::from_secs(10);
/// How often it is looked whether all ranks were heard from.
const LOOK: Duration = Duration::from_millis(20);
/// How long the follower may take to let the ranks in that are named.
const ADMISSION: Duration = Duration::from_secs(5);
/// Of an endpoint's events, all.
const TOPIC: &str = "";
/// Dynamo's NATS broker, where nothing else is said.
const NATS_SERVER: &str = "nats://localhost:4222";
/// What says where discovery is, as Dynamo takes it.
const STORE_VARIABLES: [&str; 3] = ["DYN_DISCOVERY_BACKEND", "DYN_FILE_KV", "ETCD_ENDPOINTS"];
/// What to give where nothing is given.
const OTHER_WAYS: &str =
    "name engines with --worker, or Dynamo's discovery with --file-kv or --etcd";
/// Cursor to the upper left corner, and what is behind it deleted.
const REDRAW: &str = "\x1b[H\x1b[J";

/// Options of `kvdelta observe`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvdelta observe                                  workers by DYN_DISCOVERY_BACKEND, DYN_FILE_KV,
                                                   ETCD_ENDPOINTS, as Dynamo takes them
  kvdelta observe --discovery /tmp/dynamo --component backend
  kvdelta observe --block-size 16 --worker d0=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:6557 \\
                                  --worker d1=tcp://10.0.0.2:5557,ranks=2
  kvdelta observe --block-size 16 --nats nats://10.0.0.3:4222 --namespace dynamo
  kvdelta observe --prompt-tokens prompts.json --once --json

Exit codes: 0 ended well (also when the reader of a pipe is gone), 1 by the end there was a rank that
was never heard from (no event, and no answer to a replay), no rank at all, or one that holds nothing
while events were skipped for their block size, 2 bad usage, or what was asked for could not be read
or written. Ctrl-C ends it like --count. With --once and --count the first snapshot waits until every
rank was heard from, --wait seconds at most.")]
pub(crate) struct Options {
    #[arg(
        long = "worker",
        value_name = "NAME=ENDPOINT",
        help = "An engine: NAME=tcp://host:port[,replay=tcp://host:port][,ranks=N][,engine=vllm|sglang], \
                the endpoints of its kv_events_config; may be given several times",
        requires = "block_size",
        conflicts_with_all = ["nats", "file_kv", "etcd", "namespace", "component", "model"]
    )]
    workers: Vec<Worker>,

    /// Hear all workers of Dynamo's event plane by this NATS broker; with --discovery or --etcd, those that
    /// are found there. NATS_AUTH_USERNAME and _PASSWORD, _TOKEN or _CREDENTIALS_FILE log in.
    #[arg(long, value_name = "URL", value_parser = address)]
    nats: Option<String>,

    /// Read discovery from this folder of Dynamo's file back end.
    #[arg(
        long,
        value_name = "DIR",
        visible_alias = "discovery",
        conflicts_with = "etcd"
    )]
    file_kv: Option<PathBuf>,

    /// Read discovery from etcd, by its HTTP address; several with commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = address)]
    etcd: Vec<String>,

    /// Follow workers of this namespace only.
    #[arg(long)]
    namespace: Option<String>,

    /// Follow workers of this component only.
    #[arg(long)]
    component: Option<String>,

    /// Follow workers of this model only; takes discovery.
    #[arg(long)]
    model: Option<String>,

    /// Tokens in a block, as the engine has it. Discovery tells it.
    #[arg(long, value_name = "TOKENS", value_parser = block_size)]
    block_size: Option<BlockSize>,

    /// Show what every rank holds of these prompts: token ids, a JSON array or a line a prompt.
    #[arg(long, value_name = "FILE")]
    prompt_tokens: Option<PathBuf>,

    /// The prompts' LoRA adapter.
    #[arg(long, value_name = "NAME", requires = "prompt_tokens")]
    lora: Option<String>,

    /// The prompts' cache salt.
    #[arg(long, requires = "prompt_tokens")]
    salt: Option<String>,

    /// Time between two snapshots, over which rates are counted.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,

    /// Show one snapshot and end.
    #[arg(long, conflicts_with = "count")]
    once: bool,

    /// Show so many snapshots and end.
    #[arg(long, value_name = "N", value_parser = count)]
    count: Option<u64>,

    /// How long --once and --count wait for ranks that were not heard from.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    wait: Duration,

    /// Print JSON, one snapshot a line.
    #[arg(long)]
    json: bool,
}

fn block_size(text: &str) -> Result<BlockSize, String> {
    let tokens: u32 = text
        .parse()
        .map_err(|_| "not a number of tokens".to_owned())?;
    BlockSize::try_from(tokens).map_err(|error| error.to_string())
}

fn count(text: &str) -> Result<u64, String> {
    let count = text.parse().ok().filter(|count| *count >= 1);
    count.ok_or_else(|| "not a number of snapshots, at least 1".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    let seconds = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds
        .filter(|seconds| *seconds <= Duration::from_secs(86_400))
        .ok_or_else(|| "not a number of seconds from 0 to 86400".to_owned())
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = seconds(text)?;
    let least = Duration::from_millis(100);
    match interval >= least {
        true => Ok(interval),
        false => Err("at least 0.1 seconds".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(options: &Options) -> ExitCode {
    match observe(options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::from(2)
        }
    }
}

fn observe(options: &Options) -> Result<u8> {
    let prompts = match &options.prompt_tokens {
        Some(path) => fs::read_to_string(path)
            .map_err(Into::into)
            .and_then(|text| prompt::parse(&text))
            .with_context(|| format!("cannot read prompts from {}", path.display()))?,
        None => Vec::new(),
    };
    check_distinct(&options.workers)?;
    let mut discovery = Discovery::new(options)?;
    let fleet = discovery.as_ref().map(Discovery::read_first).transpose()?;
    let block_size = options
        .block_size
        .or(fleet.as_ref().map(|fleet| fleet.block_size))
        .context("give --block-size, the tokens in a block of the engines")?;

    let index = Arc::new(Index::new(block_size));
    let (follower, control) = Follower::new(Arc::clone(&index), Settings::default());
    let runtime = Runtime::new().context("cannot start threads")?;
    runtime.spawn(follower.run());
    let stop = until_interrupted(&runtime);

    let mut followed = Followed {
        names: Names::new(),
        expected: Vec::new(),
    };
    match (&mut discovery, fleet) {
        (Some(discovery), Some(fleet)) => {
            for line in &fleet.left_out {
                say(&format!("left out: {line}"));
            }
            discovery.follow(fleet, &control, &runtime, &mut followed)?;
        }
        _ if options.nats.is_some() => {
            control.follow(Arc::new(nats(options)), Admission::Heard);
        }
        _ => follow_workers(&options.workers, &control, &mut followed)?,
    }
    let namespace = namespace(options.lora.as_deref(), options.salt.as_deref());
    let reader = Reader::new(&index, &control, &prompts, namespace);
    let mut watch = Watch {
        options,
        discovery,
        control: &control,
        runtime: &runtime,
        followed,
        stop,
    };
    watch.run(reader, &prompts, block_size)
}

/// What is followed besides what is heard of.
struct Followed {
    names: Names,
    expected: Vec<WorkerRank>,
}

fn follow_workers(workers: &[Worker], control: &Control, followed: &mut Followed) -> Result<()> {
    for (worker, id) in workers.iter().zip(1..) {
        let id = WorkerId(id);
        followed.names.insert(id, worker.name.clone());
        for rank in 0..worker.ranks {
            let of = WorkerRank {
                worker: id,
                rank: DpRank(rank),
            };
            let feed = EngineFeed::new(
                of,
                worker.dialect,
                rank,
                &worker.endpoint,
                worker.replay.as_deref(),
                TOPIC,
                Timing::default(),
            )?;
            followed.expected.push(of);
            control.follow(Arc::new(feed), Admission::Named);
        }
    }
    Ok(())
}

fn nats(options: &Options) -> NatsFeed {
    let variable = |name| env::var(name).ok();
    let server = options.nats.clone().or_else(|| variable("NATS_SERVER"));
    let user = variable("NATS_AUTH_USERNAME").zip(variable("NATS_AUTH_PASSWORD"));
    let credentials = if let Some((user, password)) = user {
        Credentials::User(user, password)
    } else if let Some(token) = variable("NATS_AUTH_TOKEN") {
        Credentials::Token(token)
    } else if let Some(file) = variable("NATS_AUTH_CREDENTIALS_FILE") {
        Credentials::File(file.into())
    } else {
        Credentials::None
    };
    let scope = Scope {
        namespace: options.namespace.clone(),
        component: options.component.clone(),
        endpoint: None,
    };
    let server = server.as_deref().unwrap_or(NATS_SERVER);
    NatsFeed::new(server, credentials, &scope, None)
}

/// Workers by discovery, read again and again.
struct Discovery {
    store: Store,
    client: Client,
    wanted: Wanted,
    component: Option<String>,
    block_size: Option<BlockSize>,
    /// Neither options nor variables say where the store is.
    is_guessed: bool,
    /// Until it is followed.
    nats: Option<NatsFeed>,
    followed: Option<Fleet>,
    read: Instant,
    error: Option<String>,
}

impl Discovery {
    /// `None`: the options name the workers.
    fn new(options: &Options) -> Result<Option<Self>> {
        let is_asked = options.file_kv.is_some() || !options.etcd.is_empty();
        let is_named = !options.workers.is_empty() || options.nats.is_some();
        if is_named && !is_asked {
            if options.model.is_some() {
                bail!("--model takes discovery: give --discovery or --etcd too");
            }
            return Ok(None);
        }
        let variable = |name: &str| env::var(name).ok();
        Ok(Some(Self {
            store: Store::choose(options.file_kv.as_deref(), &options.etcd, variable),
            client: http::client()?,
            wanted: Wanted {
                namespace: options.namespace.clone(),
                model: options.model.clone(),
            },
            component: options.component.clone(),
            block_size: options.block_size,
            is_guessed: !is_asked && STORE_VARIABLES.iter().all(|name| variable(name).is_none()),
            nats: Some(nats(options)),
            followed: None,
            read: Instant::now(),
            error: None,
        }))
    }

    /// As `read`; an error says what else could be given where nothing was.
    fn read_first(&self) -> Result<Fleet> {
        self.read().map_err(|error| match self.is_guessed {
            true => anyhow!("{error:#}; {OTHER_WAYS}"),
            false => error,
        })
    }

    fn read(&self) -> Result<Fleet> {
        let entries = self
            .store
            .read(&self.client)
            .with_context(|| format!("cannot read discovery ({})", self.store.name()))?;
        let component = self.component.as_deref();
        Fleet::read(&entries, &self.wanted, component, self.block_size)
    }

    /// Reads again what changed since; workers that are gone are forgotten.
    fn refresh(&mut self, control: &Control, runtime: &Runtime, followed: &mut Followed) {
        if self.read.elapsed() < REREAD {
            return;
        }
        self.read = Instant::now();
        let result = self
            .read()
            .and_then(|fleet| self.follow(fleet, control, runtime, followed));
        let error = result.err().map(|error| format!("{error:#}"));
        if let Some(error) = error
            .as_ref()
            .filter(|error| Some(*error) != self.error.as_ref())
        {
            say(&format!("warning: {error}"));
        }
        self.error = error;
    }

    fn follow(
        &mut self,
        fleet: Fleet,
        control: &Control,
        runtime: &Runtime,
        followed: &mut Followed,
    ) -> Result<()> {
        // The index has the block size that it began with.
        self.block_size = Some(fleet.block_size);
        if fleet.uses_nats()
            && let Some(nats) = self.nats.take()
        {
            control.follow(Arc::new(nats), Admission::Named);
        }
        let (gone, new) = fleet.changes(self.followed.as_ref());
        for id in gone {
            runtime.block_on(control.remove(id));
        }
        followed.names.clear();
        let mut unreachable = None;
        for (id, worker) in &fleet.workers {
            followed.names.insert(*id, worker.name.clone());
            if !new.contains(id) {
                continue;
            }
            let mut by_nats = Vec::new();
            for (rank, channel) in &worker.ranks {
                let of = WorkerRank {
                    worker: *id,
                    rank: *rank,
                };
                match channel {
                    Channel::Zmq {
                        publisher,
                        endpoint,
                    } => {
                        let timing = Timing::default();
                        // A rank that cannot be reached does not keep the others from being followed.
                        match PublisherFeed::new(of, *publisher, endpoint, None, timing) {
                            Ok(feed) => {
                                control.follow(Arc::new(feed), Admission::Named);
                            }
                            Err(error) => unreachable = unreachable.or(Some((of, error))),
                        }
                    }
                    Channel::Nats { .. } => by_nats.push(*rank),
                }
            }
            if !by_nats.is_empty() {
                control.admit(*id, by_nats);
            }
        }
        followed.expected = fleet.ranks().collect();
        self.followed = Some(fleet);
        match unreachable {
            None => Ok(()),
            Some((of, error)) => Err(error).with_context(|| format!("worker rank {of}")),
        }
    }
}

/// What ends the command from outside.
fn until_interrupted(runtime: &Runtime) -> mpsc::Receiver<()> {
    let (to, stop) = mpsc::channel();
    runtime.spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            // Nobody listens: it ends already.
            let _ = to.send(());
        } else {
            // No signals here: the channel must not look as if one had come.
            std::future::pending::<()>().await;
        }
    });
    stop
}

/// The snapshots, one after the other.
struct Watch<'a> {
    options: &'a Options,
    discovery: Option<Discovery>,
    control: &'a Control,
    runtime: &'a Runtime,
    followed: Followed,
    stop: mpsc::Receiver<()>,
}

impl Watch<'_> {
    fn run(
        &mut self,
        mut reader: Reader<'_>,
        prompts: &[Vec<u32>],
        block_size: BlockSize,
    ) -> Result<u8> {
        let options = self.options;
        let count = options.count.or(options.once.then_some(1));
        let mut before = None;
        if !self.wait_until(ADMISSION, |watch| watch.admitted_all()) {
            return Ok(self.exit_code());
        }
        let mut next = Instant::now();
        if count.is_some() {
            if !self.wait_until(options.wait, |watch| watch.heard_all()) {
                return Ok(self.exit_code());
            }
            before = Some(reader.read(&self.followed.names));
            next = Instant::now() + options.interval;
        }
        let mut shown = 0;
        loop {
            let wait = next.saturating_duration_since(Instant::now());
            if !self.sleep(wait) {
                break;
            }
            next += options.interval;
            // After a time in which nothing could run, the beats that were missed are not made up for.
            next = next.max(Instant::now());
            if let Some(discovery) = &mut self.discovery {
                discovery.refresh(self.control, self.runtime, &mut self.followed);
            }
            let now = reader.read(&self.followed.names);
            let snapshot = Snapshot::new(before.as_ref(), &now, prompts, block_size);
            before = Some(now);
            if !show(&snapshot, options.json)? {
                break;
            }
            shown += 1;
            if Some(shown) == count {
                break;
            }
        }
        let has_wrong_size = before.is_some_and(|last| last.has_wrong_block_size());
        Ok(self.exit_code().max(u8::from(has_wrong_size)))
    }

    /// Waits until something is so, or for so long; `false`: interrupted.
    fn wait_until(&self, wait: Duration, is_so: impl Fn(&Self) -> bool) -> bool {
        let end = Instant::now() + wait;
        while Instant::now() < end && !is_so(self) {
            if !self.sleep(LOOK) {
                return false;
            }
        }
        true
    }

    fn standings(&self) -> Vec<(WorkerRank, Standing)> {
        self.control.trust().standings(self.control.now())
    }

    fn admitted_all(&self) -> bool {
        self.standings().len() >= self.followed.expected.len()
    }

    /// Whether every rank was heard from, and none waits for what it missed.
    fn heard_all(&self) -> bool {
        let standings = self.standings();
        let is_settled =
            |standing: &Standing| is_heard(standing) && standing.reason != Some(Reason::Recovering);
        !standings.is_empty() && standings.iter().all(|(_, standing)| is_settled(standing))
    }

    fn exit_code(&self) -> u8 {
        let standings = self.standings();
        let is_heard = |of: &WorkerRank| {
            let standing = standings.iter().find(|(other, _)| other == of);
            standing.is_some_and(|(_, standing)| is_heard(standing))
        };
        let expected = &self.followed.expected;
        let all = match expected.is_empty() {
            true => !standings.is_empty(),
            false => expected.iter().all(is_heard),
        };
        u8::from(!all)
    }

    /// `false`: interrupted.
    fn sleep(&self, wait: Duration) -> bool {
        self.stop.recv_timeout(wait) == Err(mpsc::RecvTimeoutError::Timeout)
    }
}

/// Whether events of the rank came in, or its word that there are none.
fn is_heard(standing: &Standing) -> bool {
    standing.last_event.is_some() || standing.trust == Trust::Complete
}

/// Writes a snapshot; `false`: the reader is gone.
fn show(snapshot: &Snapshot, json: bool) -> Result<bool> {
    let text = if json {
        serde_json::to_string(snapshot)? + "\n"
    } else {
        let text = table::text(snapshot);
        match terminal_size::terminal_size().filter(|_| io::stdout().is_terminal()) {
            Some((columns, lines)) => {
                let lines = usize::from(lines.0).saturating_sub(1);
                REDRAW.to_owned() + &table::fit(&text, lines, columns.0.into())
            }
            None => text + "\n",
        }
    };
    match print(&text) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("cannot write the snapshot to standard output"),
    }
}
