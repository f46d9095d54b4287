// SPDX-License-Identifier: Apache-2.0

//! Real prefill workers, decode workers and a frontend as processes of this machine.
//!
//! Every process gets a process group of its own and a log. All of them are gone when the
//! [`Fleet`] is dropped.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Map, Value, json};

use crate::client::{Client, grown};
use crate::command::tail;
use crate::env;
use crate::ports::{check_port, free_ports};
use crate::progress::{Step, say};
use crate::report::{DecodeEvents, Routing};

/// Folder of the file discovery, in that of the fleet.
pub(crate) const DISCOVERY: &str = "discovery";
/// Name under which the workers serve the test model.
pub(crate) const MODEL: &str = "kvdelta-test";
/// Tokens in a block; vLLM's CPU attention takes multiples of 32. Also in [`ENGINE_OPTIONS`].
pub(crate) const BLOCK_SIZE: usize = 32;
/// Longest sequence that the workers accept. Also in [`ENGINE_OPTIONS`].
pub(crate) const MAX_TOKENS: usize = 8192;

/// Resident memory of a started worker, measured, with room for its peak.
const WORKER_BYTES: u64 = 2_200 << 20;
/// A worker that is not up by then never will be; a cold and busy machine needs minutes.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(900);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
const EVENT_SOURCES_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(500);
/// What a process writes that cannot listen on a port.
const PORT_TAKEN: &str = "Address already in use";

/// What a fleet is made of.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    /// Python of the engines' environment.
    pub(crate) python: PathBuf,
    /// Folder of the test model.
    pub(crate) model: PathBuf,
    /// The frontend built from the patched crates.
    pub(crate) frontend: PathBuf,
    /// The Python of the workers.
    pub(crate) workers: Workers,
    /// What is particular about their engines.
    pub(crate) engines: EngineSetup,
}

/// Which of Dynamo's Python packages workers run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Workers {
    /// The installed ones.
    #[default]
    Stock,
    /// Those of this overlay, and the installed ones for the rest.
    Patched(PathBuf),
}

/// What the engines of a fleet's workers have beside what all have; by default nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineSetup {
    /// More options; they beat [`ENGINE_OPTIONS`].
    pub(crate) options: Vec<String>,
    /// More options of the prefill workers alone; they beat `options`.
    pub(crate) prefill_options: Vec<String>,
    /// And of the decode workers.
    pub(crate) decode_options: Vec<String>,
    /// UCX_TLS, the transports that may move blocks; TCP and shared memory when left out.
    pub(crate) transports: Option<&'static str>,
    /// What moves the blocks of the prefill workers.
    pub(crate) prefill: Connector,
    /// And of the decode workers.
    pub(crate) decode: Connector,
}

/// The class that moves an engine's blocks. Its name is that of vLLM's own in any case.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum Connector {
    /// vLLM's own.
    #[default]
    Stock,
    /// vLLM's own, which writes down what reaches it (`tests/engines/claim_recorder.py`), see
    /// [`Fleet::claim_records`].
    Recorder,
    /// kvdelta's.
    Kvdelta {
        /// What [`crate::wheel::overlay`] returns.
        overlay: [PathBuf; 2],
        /// Its `kv_connector_extra_config`.
        settings: Map<String, Value>,
    },
}

impl Connector {
    /// vLLM's `--kv-transfer-config` of an engine; a recorder writes to `records`.
    fn config(&self, kv_role: &str, records: &Path) -> Value {
        let mut config = json!({
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_buffer_device": "cpu",
        });
        let (module, settings) = match self {
            Self::Stock => return config,
            Self::Recorder => ("claim_recorder", json!({ "claim_recorder_path": records })),
            Self::Kvdelta { settings, .. } => ("kvdelta_vllm.connector", json!(settings)),
        };
        config["kv_connector_module_path"] = json!(module);
        config["kv_connector_extra_config"] = settings;
        config
    }

    /// What its modules need in PYTHONPATH.
    fn python_path(&self) -> Vec<PathBuf> {
        match self {
            Self::Stock => Vec::new(),
            Self::Recorder => vec![env::engines_folder()],
            Self::Kvdelta { overlay, .. } => overlay.to_vec(),
        }
    }
}

/// One process, its group and its log.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// Bytes that were in its log before it.
    log_start: usize,
}

impl Process {
    /// Starts `command` with its output in `folder`; settings of the user's shell are taken away.
    pub(crate) fn spawn(name: &str, mut command: Command, folder: &Path) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let output = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        let log_start = output.metadata().map_or(0, |log| log.len());
        let child = without_inherited_settings(&mut command)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
            log_start: usize::try_from(log_start)?,
        })
    }

    fn exited(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// An error with the reason and the tail of the log if the process has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(status) = self.exited()? {
            bail!(
                "{} ended while it was needed ({status}); {}",
                self.name,
                self.tail()
            );
        }
        Ok(())
    }

    /// As [`Self::check`], while it starts: an error also if a port that it was given is taken.
    ///
    /// An engine of vLLM whose NIXL listener finds its port taken lives on and is never up.
    pub(crate) fn check_start(&mut self) -> Result<()> {
        self.check()?;
        let log =
            fs::read(&self.log).with_context(|| format!("cannot read {}", self.log.display()))?;
        // What comes before is of a process of the same name that was there earlier.
        let log = String::from_utf8_lossy(log.get(self.log_start..).unwrap_or_default());
        if let Some(line) = log.lines().find(|line| line.contains(PORT_TAKEN)) {
            bail!(
                "{} cannot start, something else listens on one of its ports: {line}; start it \
                 again; its log is {}",
                self.name,
                self.log.display()
            );
        }
        Ok(())
    }

    fn tail(&self) -> String {
        format!("the end of {}:\n{}", self.log.display(), tail(&self.log))
    }

    fn group(&self) -> Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.child.id())?))
    }

    /// Sends a signal to the whole group.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Ok(group) = self.group() {
            // A group that is gone already is what we want.
            let _ = killpg(group, signal);
        }
    }

    /// Gives the busiest threads beside the main ones, one for each of its `ranks`, the lowest priority.
    ///
    /// NIXL's progress thread polls without a pause; a few workers would leave no core to anyone.
    pub(crate) fn calm(&self, ranks: usize) {
        let group = self.child.id().try_into().ok();
        for thread in group
            .map_or_else(Vec::new, busiest_threads)
            .iter()
            .take(ranks)
        {
            let renice = Command::new("renice")
                .args(["-n", "19", "-p", &thread.to_string()])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            if !renice.is_ok_and(|status| status.success()) {
                say("warning: renice failed; NIXL's polling threads will slow everything down");
            }
        }
    }

    /// Whether no process of the group runs any more, the leader's children among them.
    ///
    /// One that has ended counts as gone though nobody has reaped it, as in a container without
    /// an init.
    fn is_gone(&mut self) -> bool {
        let reaped = matches!(self.child.try_wait(), Ok(Some(_)));
        reaped
            && self
                .group()
                .is_ok_and(|group| !processes(group).any(|process| process.runs))
    }
}

/// The threads of the processes in `group`, their main threads aside, by processor time, the most first.
fn busiest_threads(group: i32) -> Vec<u32> {
    let threads = processes(Pid::from_raw(group)).flat_map(|process| {
        let threads = entries(&Path::new("/proc").join(process.id.to_string()).join("task"));
        threads
            .filter_map(|thread| Stat::read(&thread.join("stat")))
            .filter(move |thread| thread.id != process.id)
    });
    let mut threads: Vec<Stat> = threads.collect();
    threads.sort_by_key(|thread| Reverse(thread.ticks));
    threads.into_iter().map(|thread| thread.id).collect()
}

/// The processes of a group, ended ones that nobody has reaped among them.
fn processes(group: Pid) -> impl Iterator<Item = Stat> {
    entries(Path::new("/proc"))
        .filter_map(|process| Stat::read(&process.join("stat")))
        .filter(move |process| process.group == group.as_raw())
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// Fields of `/proc/.../stat`, see proc(5).
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    id: u32,
    group: i32,
    ticks: u64,
    /// Not a zombie.
    runs: bool,
}

impl Stat {
    fn read(path: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name stands in parentheses and may contain anything.
        let (id, rest) = (text.split_once(' ')?.0, text.rsplit_once(") ")?.1);
        let fields: Vec<&str> = rest.split(' ').collect();
        let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            id: id.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            ticks: ticks(11)? + ticks(12)?,
            runs: !matches!(fields.first()?, &"Z" | &"X"),
        })
    }
}

/// Takes settings of the user's shell away that would change what a run measures.
fn without_inherited_settings(command: &mut Command) -> &mut Command {
    let set: HashSet<OsString> = command
        .get_envs()
        .map(|(name, _)| name.to_owned())
        .collect();
    for (name, _) in std::env::vars_os() {
        let is_setting = INHERITED_SETTINGS
            .iter()
            .any(|prefix| name.to_string_lossy().starts_with(prefix));
        if is_setting && !set.contains(&name) {
            command.env_remove(name);
        }
    }
    command
}

/// Beginnings of names of variables.
const INHERITED_SETTINGS: [&str; 7] = [
    "DYN_",
    "VLLM_",
    "NIXL_",
    "UCX_",
    "KV_",
    "ETCD_",
    "PYTHONPATH",
];

/// Ends the processes: asks first, then kills, and waits until they are gone. Nothing of them is left.
pub(crate) fn stop(processes: &mut [Process]) {
    let groups = processes.iter().filter_map(|process| process.group().ok());
    let memory: HashSet<PathBuf> = groups.flat_map(memory_of_ranks).collect();
    end(processes);
    for file in memory {
        // One that is gone already is what we want.
        let _ = fs::remove_file(file);
    }
}

/// Files by which the tensor-parallel ranks of an engine share memory; vLLM never removes them.
fn memory_of_ranks(group: Pid) -> impl Iterator<Item = PathBuf> {
    processes(group).flat_map(|process| {
        let maps = Path::new("/proc").join(process.id.to_string()).join("maps");
        mapped(&fs::read_to_string(maps).unwrap_or_default())
    })
}

/// Those files in `/proc/.../maps`, see proc(5).
fn mapped(maps: &str) -> Vec<PathBuf> {
    let file = |line: &str| Some(PathBuf::from(&line[line.find("/dev/shm/vllm_dist_")?..]));
    maps.lines().filter_map(file).collect()
}

fn end(processes: &mut [Process]) {
    for (signal, patience) in [
        (Signal::SIGTERM, STOP_TIMEOUT),
        (Signal::SIGKILL, STOP_TIMEOUT),
    ] {
        let deadline = Instant::now() + patience;
        let mut left: Vec<&mut Process> = processes
            .iter_mut()
            .filter_map(|process| (!process.is_gone()).then_some(process))
            .collect();
        for process in &left {
            process.signal(signal);
        }
        while !left.is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(50));
            left.retain_mut(|process| !process.is_gone());
        }
        if left.is_empty() {
            return;
        }
    }
    say("warning: a process could not be ended");
}

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Prefill,
    Decode,
}

#[derive(Debug)]
struct Worker {
    role: Role,
    /// Where its metrics are.
    base: String,
    process: Process,
}

/// Prefill and decode workers with one frontend before them.
#[derive(Debug)]
pub(crate) struct Fleet {
    parts: Parts,
    folder: PathBuf,
    client: Client,
    workers: Vec<Worker>,
    frontend: Option<(Process, String)>,
}

impl Fleet {
    /// Starts `prefill` and `decode` workers; logs and discovery go to `folder`. No frontend yet.
    ///
    /// # Errors
    /// Too little memory, or a worker that cannot be started.
    pub(crate) fn start(
        parts: &Parts,
        folder: &Path,
        client: &Client,
        prefill: usize,
        decode: usize,
    ) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut fleet = Self {
            parts: parts.clone(),
            folder: folder.to_owned(),
            client: client.clone(),
            workers: Vec::new(),
            frontend: None,
        };
        check_memory(prefill + decode)?;
        let roles = std::iter::repeat_n(Role::Prefill, prefill)
            .chain(std::iter::repeat_n(Role::Decode, decode));
        for role in roles {
            let index = fleet
                .workers
                .iter()
                .filter(|worker| worker.role == role)
                .count();
            let worker = fleet.spawn_worker(role, index)?;
            fleet.workers.push(worker);
        }
        Ok(fleet)
    }

    fn spawn_worker(&self, role: Role, index: usize) -> Result<Worker> {
        let [system, side_channel, events] = free_ports()?;
        let engines = &self.parts.engines;
        let (mode, kv_role, connector, options) = match role {
            Role::Prefill => (
                "prefill",
                "kv_producer",
                &engines.prefill,
                &engines.prefill_options,
            ),
            Role::Decode => (
                "decode",
                "kv_consumer",
                &engines.decode,
                &engines.decode_options,
            ),
        };
        let mut python_path = match &self.parts.workers {
            Workers::Stock => Vec::new(),
            Workers::Patched(overlay) => vec![overlay.clone()],
        };
        python_path.extend(connector.python_path());
        let connector = connector.config(kv_role, &self.claim_records_file(mode, index));
        let mut command = Command::new(&self.parts.python);
        command
            .args([
                "-m",
                "dynamo.vllm",
                "--disaggregation-mode",
                mode,
                "--model",
            ])
            .arg(&self.parts.model)
            .args(["--served-model-name", MODEL])
            .args(ENGINE_OPTIONS)
            .args(&engines.options)
            .args(options)
            .args(["--kv-transfer-config", &connector.to_string()])
            .arg("--kv-events-config")
            .arg(
                json!({
                    "enable_kv_cache_events": true,
                    "publisher": "zmq",
                    "endpoint": format!("tcp://*:{events}"),
                })
                .to_string(),
            )
            .env("DYN_SYSTEM_PORT", system.to_string())
            .env("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
            .env("VLLM_NIXL_SIDE_CHANNEL_PORT", side_channel.to_string())
            .env("UCX_TLS", engines.transports.unwrap_or("tcp,sm,self"))
            .envs(engine_environment())
            .envs(self.dynamo_environment());
        if !python_path.is_empty() {
            command.env("PYTHONPATH", std::env::join_paths(python_path)?);
        }
        Ok(Worker {
            role,
            base: format!("http://127.0.0.1:{system}"),
            process: Process::spawn(&format!("{mode}-{index}"), command, &self.folder)?,
        })
    }

    fn claim_records_file(&self, mode: &str, index: usize) -> PathBuf {
        self.folder.join(format!("claims-{mode}-{index}.jsonl"))
    }

    /// What the connectors of the prefill workers and of the decode workers write down.
    pub(crate) fn claim_records(&self) -> [Vec<PathBuf>; 2] {
        let decode = self.decode_workers().count();
        let files = |mode, count| {
            (0..count)
                .map(|index| self.claim_records_file(mode, index))
                .collect()
        };
        [
            files("prefill", self.workers.len() - decode),
            files("decode", decode),
        ]
    }

    /// Where the metrics of each decode worker are, in their order.
    pub(crate) fn decode_bases(&self) -> impl Iterator<Item = &str> {
        self.decode_workers().map(|worker| worker.base.as_str())
    }

    /// Where the metrics of each prefill worker are, in their order.
    pub(crate) fn prefill_bases(&self) -> impl Iterator<Item = &str> {
        let prefill = self.workers.iter();
        prefill
            .filter(|worker| worker.role == Role::Prefill)
            .map(|worker| worker.base.as_str())
    }

    /// Ends the frontend; [`Self::start_frontend`] starts another.
    pub(crate) fn stop_frontend(&mut self) {
        if let Some((process, _)) = &mut self.frontend {
            stop(std::slice::from_mut(process));
        }
        self.frontend = None;
    }

    /// File discovery and brokerless planes: no service has to run beside the processes.
    fn dynamo_environment(&self) -> [(&'static str, OsString); 6] {
        [
            ("DYN_TCP_RPC_HOST", "127.0.0.1".into()),
            ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0".into()),
            ("DYN_DISCOVERY_BACKEND", "file".into()),
            ("DYN_FILE_KV", self.folder.join(DISCOVERY).into()),
            ("DYN_REQUEST_PLANE", "tcp".into()),
            ("DYN_EVENT_PLANE", "zmq".into()),
        ]
    }

    /// Starts the frontend with this routing, and waits until it sees every worker.
    pub(crate) async fn start_frontend(
        &mut self,
        routing: Routing,
        port: Option<u16>,
    ) -> Result<()> {
        let port = match port {
            Some(port) => check_port(port)?,
            None => free_ports::<1>()?[0],
        };
        let mut command = Command::new(&self.parts.frontend);
        command
            .args(["--router-mode", "kv", "--http-host", "127.0.0.1"])
            .args(["--http-port", &port.to_string()])
            .args(["--kv-cache-block-size", &BLOCK_SIZE.to_string()])
            .arg(format!(
                "--router-decode-overlap-score-weight={}",
                routing.weight
            ))
            .args(
                routing
                    .conditional_disagg
                    .then_some("--router-conditional-disagg"),
            )
            .env("DYN_LOG", "info")
            .envs(self.dynamo_environment());
        let process = Process::spawn("frontend", command, &self.folder)?;
        self.frontend = Some((process, format!("http://127.0.0.1:{port}")));
        self.ready("frontend and workers").await
    }

    /// Waits until the frontend routes to every worker of this fleet and to no other.
    pub(crate) async fn ready(&mut self, what: &str) -> Result<()> {
        let mut step = Step::begin(what.to_owned());
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            self.processes().try_for_each(Process::check_start)?;
            let seen = self.registered().await.unwrap_or_default();
            let wanted = [Role::Prefill, Role::Decode].map(|role| {
                self.workers
                    .iter()
                    .filter(|worker| worker.role == role)
                    .count()
            });
            let found = [Role::Prefill, Role::Decode].map(|role| seen.of(role).len());
            if found == wanted && self.lists_model().await {
                self.workers
                    .iter()
                    .for_each(|worker| worker.process.calm(1));
                step.end();
                return Ok(());
            }
            if Instant::now() > deadline {
                let ends: String = self.processes().map(|process| process.tail()).collect();
                bail!(
                    "{what}: after {} s the frontend sees {found:?} of {wanted:?} prefill and \
                     decode workers; logs are in {}\n{ends}",
                    START_TIMEOUT.as_secs(),
                    self.folder.display()
                );
            }
            step.tick(&format!(
                "(the frontend sees {} of {} prefill, {} of {} decode workers)",
                found[0], wanted[0], found[1], wanted[1]
            ));
            tokio::time::sleep(POLL).await;
        }
    }

    async fn lists_model(&self) -> bool {
        let Ok(base) = self.base() else { return false };
        let models = self.client.get(&format!("{base}/v1/models")).await;
        models.is_ok_and(|models| models.contains(MODEL))
    }

    async fn registered(&self) -> Result<Registered> {
        let metrics = self
            .client
            .get(&format!("{}/metrics", self.base()?))
            .await?;
        Ok(Registered::parse(&metrics))
    }

    /// Where the frontend listens.
    pub(crate) fn base(&self) -> Result<&str> {
        let (_, base) = self.frontend.as_ref().context("no frontend was started")?;
        Ok(base)
    }

    /// An error if any process has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.processes().try_for_each(Process::check)
    }

    fn processes(&mut self) -> impl Iterator<Item = &mut Process> {
        let workers = self.workers.iter_mut().map(|worker| &mut worker.process);
        workers.chain(self.frontend.iter_mut().map(|(frontend, _)| frontend))
    }

    /// What the frontend wrote.
    pub(crate) fn frontend_log(&self) -> Result<String> {
        let (frontend, _) = self.frontend.as_ref().context("no frontend was started")?;
        fs::read_to_string(&frontend.log)
            .with_context(|| format!("cannot read {}", frontend.log.display()))
    }

    /// What the frontend did about the KV events of decode workers, by its log and by the number
    /// of workers whose events it takes.
    pub(crate) async fn decode_events(&self) -> Result<DecodeEvents> {
        let skipped = self.frontend_log()?.contains(SKIPPED);
        let sources = self.event_sources().await?;
        let prefill = self.workers.len() - self.decode_workers().count();
        match (skipped, sources) {
            (true, sources) if sources == prefill => Ok(DecodeEvents::Skipped),
            (false, sources) if sources == self.workers.len() => Ok(DecodeEvents::Subscribed),
            _ => bail!(
                "the frontend takes the KV events of {sources} workers and its log {} that it skips \
                 those of a pool",
                if skipped { "says" } else { "does not say" }
            ),
        }
    }

    /// A counter of every decode worker, in their order; `None` where it is absent.
    pub(crate) async fn decode_counters(&self, name: &str) -> Result<Vec<Option<f64>>> {
        let mut counters = Vec::new();
        for worker in self.decode_workers() {
            counters.push(self.client.metric(&worker.base, name).await?);
        }
        Ok(counters)
    }

    /// Workers whose KV events the frontend takes, of both pools.
    pub(crate) async fn event_sources(&self) -> Result<usize> {
        let sources = self.client.metric(self.base()?, EVENT_SOURCES).await?;
        Ok(grown(&[0.0], &[sources.unwrap_or(0.0)])[0].try_into()?)
    }

    /// The event sources once there are `expected` of them, or at last: the frontend learns of
    /// workers and of their events on two ways.
    pub(crate) async fn event_sources_until(&self, expected: usize) -> Result<usize> {
        let deadline = Instant::now() + EVENT_SOURCES_TIMEOUT;
        loop {
            let sources = self.event_sources().await?;
            if sources == expected || Instant::now() > deadline {
                return Ok(sources);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    fn decode_workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers
            .iter()
            .filter(|worker| worker.role == Role::Decode)
    }

    /// Kills decode worker `index` at once, as a crash would; the frontend is not told.
    pub(crate) fn kill_decode(&mut self, index: usize) -> Result<()> {
        let position = self.decode_position(index)?;
        let mut worker = self.workers.remove(position);
        worker.process.signal(Signal::SIGKILL);
        stop(std::slice::from_mut(&mut worker.process));
        say(format!("killed {}", worker.process.name));
        Ok(())
    }

    /// Starts decode worker `index` again after [`Self::kill_decode`].
    pub(crate) fn restart_decode(&mut self, index: usize) -> Result<()> {
        check_memory(1)?;
        let worker = self.spawn_worker(Role::Decode, index)?;
        let prefill = self.workers.len() - self.decode_workers().count();
        self.workers.insert(prefill + index, worker);
        Ok(())
    }

    fn decode_position(&self, index: usize) -> Result<usize> {
        self.workers
            .iter()
            .enumerate()
            .filter(|(_, worker)| worker.role == Role::Decode)
            .map(|(position, _)| position)
            .nth(index)
            .with_context(|| format!("there is no decode worker {index}"))
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let mut processes: Vec<Process> = Vec::new();
        processes.extend(self.frontend.take().map(|(process, _)| process));
        processes.extend(self.workers.drain(..).map(|worker| worker.process));
        stop(&mut processes);
    }
}

/// One aggregated vLLM worker with its own HTTP server, for reference answers.
#[derive(Debug)]
pub(crate) struct Aggregated {
    process: Process,
    base: String,
}

impl Aggregated {
    /// Starts it and waits until it answers.
    pub(crate) async fn start(parts: &Parts, folder: &Path, client: &Client) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        check_memory(1)?;
        let [port] = free_ports()?;
        let mut command = api_server(&parts.python, &parts.model, port);
        command.args(ENGINE_OPTIONS);
        let mut aggregated = Self {
            process: Process::spawn("aggregated", command, folder)?,
            base: format!("http://127.0.0.1:{port}"),
        };
        let mut step = Step::begin("aggregated worker");
        let deadline = Instant::now() + START_TIMEOUT;
        while client
            .get(&format!("{}/health", aggregated.base))
            .await
            .is_err()
        {
            aggregated.process.check_start()?;
            if Instant::now() > deadline {
                bail!(
                    "the aggregated worker is not up after {} s",
                    START_TIMEOUT.as_secs()
                );
            }
            step.tick("");
            tokio::time::sleep(POLL).await;
        }
        step.end();
        Ok(aggregated)
    }

    /// Where it listens.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }
}

impl Drop for Aggregated {
    fn drop(&mut self) {
        stop(std::slice::from_mut(&mut self.process));
    }
}

/// Worker ids that a frontend has registered, by pool.
#[derive(Debug, Default, PartialEq, Eq)]
struct Registered {
    prefill: HashSet<String>,
    decode: HashSet<String>,
}

impl Registered {
    fn of(&self, role: Role) -> &HashSet<String> {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    /// From the frontend's metrics.
    fn parse(metrics: &str) -> Self {
        let mut registered = Self::default();
        for line in metrics.lines() {
            let Some(labels) = line.strip_prefix("dynamo_component_router_worker_registered{")
            else {
                continue;
            };
            let label = |name: &str| {
                let rest = labels.split(&format!("{name}=\"")).nth(1)?;
                Some(rest.split('"').next()?.to_owned())
            };
            if labels.ends_with("} 0") {
                continue;
            }
            match (label("worker_type").as_deref(), label("router_worker_id")) {
                (Some("prefill"), Some(id)) => registered.prefill.insert(id),
                (Some("decode"), Some(id)) => registered.decode.insert(id),
                _ => false,
            };
        }
        registered
    }
}

/// What the frontend logs for a pool whose index it does not need.
const SKIPPED: &str = "Skipping KV event subscription";
/// Workers whose KV events a frontend takes, of all pools.
const EVENT_SOURCES: &str = "dynamo_component_router_kv_zmq_ingress_sources";

/// Options of vLLM in every worker. The KV cache holds 2,048 blocks of the test model.
pub(crate) const ENGINE_OPTIONS: [&str; 12] = [
    "--block-size",
    "32",
    "--max-model-len",
    "8192",
    "--dtype",
    "float32",
    "--kv-cache-memory-bytes",
    "268435456",
    "--distributed-executor-backend",
    "uni",
    "--enforce-eager",
    "--enable-prefix-caching",
];

/// A vLLM server by itself, with the test model of the folder `model`, without [`ENGINE_OPTIONS`].
pub(crate) fn api_server(python: &Path, model: &Path, port: u16) -> Command {
    let mut command = Command::new(python);
    command
        .args(["-m", "vllm.entrypoints.openai.api_server", "--model"])
        .arg(model)
        .args(["--served-model-name", MODEL])
        .args(["--host", "127.0.0.1", "--port", &port.to_string()])
        .envs(engine_environment());
    command
}

/// vLLM's `--kv-events-config` of an engine that also answers for events that were missed.
pub(crate) fn kv_events(publish: u16, replay: u16) -> String {
    json!({
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": format!("tcp://*:{publish}"),
        "replay_endpoint": format!("tcp://*:{replay}"),
    })
    .to_string()
}

/// Variables of every engine.
pub(crate) fn engine_environment() -> [(&'static str, &'static str); 7] {
    [
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        // With the executor above it saves one process a worker.
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        // The sampler compiles for log-probabilities even with --enforce-eager.
        ("TORCH_COMPILE_DISABLE", "1"),
        ("OMP_NUM_THREADS", "1"),
        // Otherwise all workers are bound to the same core.
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("TRANSFORMERS_OFFLINE", "1"),
    ]
}

/// An error if `workers` more workers do not fit into the memory of this machine.
pub(crate) fn check_memory(workers: usize) -> Result<()> {
    check_memory_of(workers, available_bytes()?)
}

fn check_memory_of(workers: usize, available_bytes: u64) -> Result<()> {
    let needed_bytes = workers as u64 * WORKER_BYTES;
    if needed_bytes > available_bytes {
        bail!(
            "too little memory: {workers} workers need about {:.1} GiB, available are \
             {:.1} GiB; ask for fewer with --prefill and --decode",
            gib(needed_bytes),
            gib(available_bytes)
        );
    }
    Ok(())
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn available_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let kib: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .context("/proc/meminfo has no MemAvailable")?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_dropped_process_takes_its_children_along() {
        let folder = tempfile::tempdir().unwrap();
        let pids = folder.path().join("pids");
        let mut command = Command::new("sh");
        // The child ignores the polite signal, as a stuck engine would.
        command.arg("-c").arg(format!(
            "sh -c 'trap \"\" TERM; echo $$ > {}; sleep 1000' & wait",
            pids.display()
        ));
        let mut process = Process::spawn("test", command, folder.path()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let child = loop {
            let text = fs::read_to_string(&pids).unwrap_or_default();
            if let Ok(pid) = text.trim().parse::<i32>() {
                break Pid::from_raw(pid);
            }
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(10));
        };
        process.signal(Signal::SIGKILL);
        stop(std::slice::from_mut(&mut process));
        // It has ended; whoever inherited it may still have to reap it.
        while nix::sys::signal::kill(child, None) != Err(Errno::ESRCH) {
            assert!(Instant::now() < deadline, "{child} is left");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn only_the_memory_of_ranks_is_removed() {
        let maps = "7f2a6dfff000-7f2a78000000 rw-s 00000000 00:1b 9911   /dev/shm/psm_f9adb3b5\n\
                    7f2ab83f8000-7f2ab87f9000 rw-s 00000000 00:1b 9915   /dev/shm/vllm_dist_32ab-tp:0-[0-1]-cpushm_1\n\
                    7ffd1c5f4000-7ffd1c616000 rw-p 00000000 00:00 0      [stack]\n";
        let file = PathBuf::from("/dev/shm/vllm_dist_32ab-tp:0-[0-1]-cpushm_1");
        assert_eq!(mapped(maps), [file]);
    }

    #[test]
    fn an_ended_process_is_an_error_with_its_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such model >&2; exit 3"]);
        let mut process = Process::spawn("worker", command, folder.path()).unwrap();
        process.child.wait().unwrap();
        let error = process.check().unwrap_err().to_string();
        for part in ["worker", "exit status: 3", "no such model"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn too_little_memory_is_said_in_one_line() {
        assert!(check_memory_of(3, 8 << 30).is_ok());
        let error = check_memory_of(5, 8 << 30).unwrap_err().to_string();
        assert!(error.contains("5 workers"), "{error}");
        assert_eq!(error.lines().count(), 1);
    }

    #[test]
    fn a_process_that_lives_on_without_its_port_has_not_started() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        let line = "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:23998')";
        command.args(["-c", "echo up; echo \"$0\"; sleep 1000", line]);
        // That of an earlier life counts no more.
        fs::write(
            folder.path().join("prefill-0.log"),
            format!("{line} before\n"),
        )
        .unwrap();
        let mut process = Process::spawn("prefill-0", command, folder.path()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = loop {
            process.check().unwrap();
            if let Err(error) = process.check_start() {
                break error.to_string();
            }
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(10));
        };
        stop(std::slice::from_mut(&mut process));
        assert!(error.starts_with("prefill-0 cannot start"), "{error}");
        assert!(error.contains(line) && !error.contains("before"), "{error}");
    }

    #[test]
    fn a_thread_is_read_whatever_its_name() {
        let text = "77 (VLLM::Engine) R 1) S 28 76 76 0 -1 4194304 1 2 3 4 500 60 0 0 20 0";
        assert_eq!(
            Stat::parse(text),
            Some(Stat {
                id: 77,
                group: 76,
                ticks: 560,
                runs: true
            })
        );
        assert!(!Stat::parse(&text.replace(" S ", " Z ")).unwrap().runs);
        assert_eq!(Stat::parse("77 (x"), None);
    }

    #[test]
    fn registered_workers_are_counted_by_pool() {
        let metrics = "# TYPE dynamo_component_router_worker_registered gauge\n\
            dynamo_component_router_worker_registered{dp_rank=\"0\",router_worker_id=\"1\",worker_type=\"decode\"} 1\n\
            dynamo_component_router_worker_registered{dp_rank=\"0\",router_worker_id=\"2\",worker_type=\"decode\"} 0\n\
            dynamo_component_router_worker_registered{dp_rank=\"0\",router_worker_id=\"3\",worker_type=\"prefill\"} 1\n";
        let registered = Registered::parse(metrics);
        assert_eq!(registered.decode, HashSet::from(["1".to_owned()]));
        assert_eq!(registered.prefill, HashSet::from(["3".to_owned()]));
    }
}
