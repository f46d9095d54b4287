// SPDX-License-Identifier: Apache-2.0

//! A fleet of workers, and the frontends that route to it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use anyhow::{Context as _, Result, ensure};
use dynamo_kv_router::KvRouterConfig;
use dynamo_llm::discovery::ModelManager;
use dynamo_llm::entrypoint::RouterConfig;
use dynamo_llm::kv_router::KvRouter;
use dynamo_llm::kv_router::plugins::install_router_plugin_registry;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::pipeline::RouterMode;
use dynamo_runtime::{DistributedRuntime, Runtime};
use kvdelta_recorder::deployment::{distributed, free_port, serve};
use kvdelta_recorder::settings::{Settings, set_weight, write_model};

use super::ask::{Answer, Ask, Client, Metrics, Sent};
use super::engine::PROBE;
use super::ledger::Ledger;
use super::run::until;
use super::trace::{Line, Trace};
use super::worker::{Common, Spec, Worker, endpoint};

/// Frontends of one process share the table of policies, and the gauges of loads by worker.
static POLICIES: LazyLock<std::result::Result<(), String>> = LazyLock::new(|| {
    let policies = Settings::policies().map_err(|error| format!("{error:#}"))?;
    install_router_plugin_registry(policies)
        .then_some(())
        .ok_or_else(|| "policies were installed already".to_owned())
});
static FLEETS: AtomicU64 = AtomicU64::new(0);

const LOOKS_BEFORE_A_PROBE: usize = 100;

const DECODE_BLOCKS: &str = "dynamo_frontend_worker_active_decode_blocks";
const PREFILL_TOKENS: &str = "dynamo_frontend_worker_active_prefill_tokens";
const QUEUED: &str = "dynamo_frontend_router_queue_pending_requests";

/// A fleet to be started.
#[derive(Debug)]
pub(crate) struct Builder {
    prefill: Vec<Spec>,
    decode: Vec<Spec>,
    frontends: usize,
    migrations: Option<u32>,
    router: RouterConfig,
}

impl Builder {
    /// One frontend without workers, whose router weighs a decode worker's prefix with `weight`.
    pub(crate) fn new(weight: f64) -> Result<Self> {
        let mut config = KvRouterConfig {
            router_replica_sync: true,
            ..KvRouterConfig::default()
        };
        set_weight(&mut config, Some(weight))?;
        Ok(Self {
            prefill: Vec::new(),
            decode: Vec::new(),
            frontends: 1,
            migrations: None,
            router: RouterConfig::new(RouterMode::KV, config),
        })
    }

    /// Adds prefill workers.
    pub(crate) fn prefill(mut self, workers: usize, spec: Spec) -> Self {
        self.prefill.extend(vec![spec; workers]);
        self
    }

    /// Adds decode workers.
    pub(crate) fn decode(mut self, workers: usize, spec: Spec) -> Self {
        self.decode.extend(vec![spec; workers]);
        self
    }

    /// How many frontends, each with routers of its own.
    pub(crate) fn frontends(mut self, frontends: usize) -> Self {
        self.frontends = frontends;
        self
    }

    /// How often a request may go on with another worker.
    pub(crate) fn migrations(mut self, migrations: u32) -> Self {
        self.migrations = Some(migrations);
        self
    }

    /// Changes the router's settings.
    pub(crate) fn router(mut self, change: impl FnOnce(&mut RouterConfig)) -> Self {
        change(&mut self.router);
        self
    }

    /// Starts all, and waits until every frontend serves every worker.
    pub(crate) async fn start(self, trace: &Trace) -> Result<Fleet> {
        POLICIES.clone().map_err(anyhow::Error::msg)?;
        ensure!(
            !self.prefill.is_empty() && !self.decode.is_empty(),
            "a fleet has workers of both roles"
        );
        let folder = tempfile::tempdir()?;
        let discovery = folder.path().join("discovery");
        std::fs::create_dir(&discovery)?;
        let mut fleet = Fleet {
            name: format!("mock-{}", FLEETS.fetch_add(1, Ordering::Relaxed)),
            model: write_model(&folder.path().join("model"))?,
            discovery,
            trace: trace.clone(),
            order: Arc::default(),
            prefill: Vec::new(),
            decode: Vec::new(),
            frontends: Vec::new(),
            migrations: self.migrations,
            router: self.router,
            ledger: None,
            _folder: folder,
        };
        for (role, specs) in [
            (WorkerType::Prefill, self.prefill),
            (WorkerType::Decode, self.decode),
        ] {
            for spec in specs {
                fleet.start_worker(role, spec).await?;
            }
        }
        let listener = fleet.distributed().await?;
        fleet.ledger = Some(Ledger::listen(listener, &fleet.name).await?);
        for _ in 0..self.frontends {
            fleet.start_frontend().await?;
        }
        fleet.served().await?;
        Ok(fleet)
    }
}

/// A frontend with its routers.
struct Frontend {
    runtime: DistributedRuntime,
    client: Client,
}

/// A fleet that serves.
pub(crate) struct Fleet {
    /// Its prefill workers, oldest first.
    pub(crate) prefill: Vec<Arc<Worker>>,
    /// Its decode workers, oldest first.
    pub(crate) decode: Vec<Arc<Worker>>,
    name: String,
    model: PathBuf,
    discovery: PathBuf,
    trace: Trace,
    order: Arc<AtomicU64>,
    frontends: Vec<Frontend>,
    migrations: Option<u32>,
    router: RouterConfig,
    ledger: Option<Ledger>,
    _folder: tempfile::TempDir,
}

impl Fleet {
    /// Starts one more worker. [`Self::served`] waits until the frontends serve it.
    pub(crate) async fn start_worker(
        &mut self,
        role: WorkerType,
        spec: Spec,
    ) -> Result<Arc<Worker>> {
        let pool = match role {
            WorkerType::Prefill => &mut self.prefill,
            _ => &mut self.decode,
        };
        let common = Common {
            namespace: &self.name,
            discovery: &self.discovery,
            model: &self.model,
            order: &self.order,
        };
        let name = format!("{} {}", role.as_str(), pool.len());
        let worker = Arc::new(Worker::start(common, role, name, spec).await?);
        pool.push(worker.clone());
        Ok(worker)
    }

    /// Starts one more frontend. [`Self::served`] waits until it serves the workers.
    pub(crate) async fn start_frontend(&mut self) -> Result<()> {
        let runtime = self.distributed().await?;
        let port = free_port()?;
        serve(runtime.clone(), self.router.clone(), self.migrations, port).await?;
        self.frontends.push(Frontend {
            runtime,
            client: Client {
                http: reqwest::Client::new(),
                address: format!("http://127.0.0.1:{port}"),
                model: self.name.clone(),
            },
        });
        Ok(())
    }

    /// Another router of the decode workers, without a frontend, and its id.
    pub(crate) async fn observer(&self) -> Result<(u64, Arc<KvRouter>)> {
        let runtime = self.distributed().await?;
        let endpoint = endpoint(&runtime, &self.name, WorkerType::Decode)?;
        let router = ModelManager::new()
            .kv_chooser_for_with_worker_role(
                &endpoint,
                self.decode[0].spec.block_tokens,
                Some(self.router.kv_router_config.clone()),
                None,
                Some(WorkerType::Decode),
                WorkerType::Decode.as_str(),
                Some(self.name.clone()),
                false,
            )
            .await?;
        Ok((runtime.connection_id(), router))
    }

    /// Bookings and their changes that were heard of: how many events, which requests of which
    /// worker, and of which routers.
    pub(crate) fn heard(&self) -> Result<(usize, BTreeMap<String, u64>, BTreeSet<u64>)> {
        let bookings = self.ledger()?.bookings();
        let open = bookings.open.into_iter();
        let open =
            open.map(|((router, role, id), worker)| (format!("{router} {role} {id}"), worker));
        let routers = bookings.heard.into_iter().map(|(router, _)| router);
        Ok((bookings.events, open.collect(), routers.collect()))
    }

    async fn distributed(&self) -> Result<DistributedRuntime> {
        distributed(&Runtime::from_current()?, Path::new(&self.discovery)).await
    }

    /// Waits until every frontend serves every worker that is not gone, and its bookings are heard.
    pub(crate) async fn served(&self) -> Result<()> {
        let (prefill, decode) = (present(&self.prefill), present(&self.decode));
        for frontend in &self.frontends {
            for probe in probes(&prefill, &decode) {
                until("a frontend serves all workers", async || {
                    // Before it listens there is no answer at all.
                    match probe.clone().send(&frontend.client).answer().await {
                        Ok(answer) if answer.status == 200 => Ok(Ok(())),
                        Ok(answer) => Ok(Err(format!("{}: {}", answer.status, answer.body))),
                        Err(error) => Ok(Err(format!("{error:#}"))),
                    }
                })
                .await?;
            }
            let router = frontend.runtime.connection_id();
            until("a router's bookings are heard", async || {
                let heard = self.ledger()?.bookings().heard;
                if heard.iter().filter(|(of, _)| *of == router).count() == 2 {
                    return Ok(Ok(()));
                }
                Ask::new(&PROBE).send(&frontend.client).answer().await?;
                Ok(Err(format!("{heard:?}")))
            })
            .await?;
        }
        self.nothing_booked().await
    }

    fn ledger(&self) -> Result<&Ledger> {
        self.ledger.as_ref().context("the fleet did not start")
    }

    /// Sends a request to the first frontend.
    pub(crate) fn send(&self, ask: Ask) -> Result<Sent> {
        self.send_to(0, ask)
    }

    /// Sends a request to a frontend.
    pub(crate) fn send_to(&self, frontend: usize, ask: Ask) -> Result<Sent> {
        Ok(ask.send(&self.frontend(frontend)?.client))
    }

    /// Sends a request to the first frontend and waits for its answer.
    pub(crate) async fn ask(&self, ask: Ask) -> Result<Answer> {
        self.send(ask)?.answer().await
    }

    fn frontend(&self, number: usize) -> Result<&Frontend> {
        let frontend = self.frontends.get(number);
        frontend.with_context(|| format!("no frontend {number}"))
    }

    /// How many frontends it has.
    pub(crate) fn frontends(&self) -> usize {
        self.frontends.len()
    }

    /// A frontend's metrics.
    pub(crate) async fn metrics(&self, frontend: usize) -> Result<Metrics> {
        Metrics::read(&self.frontend(frontend)?.client).await
    }

    /// The first frontend's gauges of loads and queues of this fleet, in order.
    pub(crate) async fn gauges(&self) -> Result<Vec<String>> {
        let metrics = self.metrics(0).await?;
        let mut gauges = Vec::new();
        for worker in self.prefill.iter().chain(&self.decode) {
            for name in [DECODE_BLOCKS, PREFILL_TOKENS] {
                for (series, value) in metrics.of(name, &[("worker_id", &worker.id.to_string())])? {
                    gauges.push(format!("{series} {value}"));
                }
            }
        }
        gauges.push(format!(
            "{}",
            metrics.sum(QUEUED, &[("model", &self.name)])?
        ));
        gauges.sort();
        Ok(gauges)
    }

    /// What the routers count as load of a worker: blocks of a decode worker, prompt tokens of a
    /// prefill worker, all ranks together. Frontends share the gauge; the last to change it shows.
    pub(crate) async fn load(&self, worker: &Worker) -> Result<f64> {
        self.load_on(&self.metrics(0).await?, worker)
    }

    fn load_on(&self, metrics: &Metrics, worker: &Worker) -> Result<f64> {
        let name = match worker.role {
            WorkerType::Prefill => PREFILL_TOKENS,
            _ => DECODE_BLOCKS,
        };
        metrics.sum(name, &[("worker_id", &worker.id.to_string())])
    }

    /// Waits until a frontend's router knows that this rank of a decode worker holds as many blocks
    /// of `prompt` as said. Asks without booking anything.
    pub(crate) async fn holds(
        &self,
        frontend: usize,
        worker: &Worker,
        rank: u32,
        prompt: &[u32],
        blocks: usize,
    ) -> Result<()> {
        let what = format!(
            "{blocks} blocks are known of {}, rank {rank}",
            worker.name()
        );
        let prefix = format!("worker_id={} dp_rank={rank},", worker.id);
        until(&what, async || {
            let ask = Ask::new(prompt).decode(worker, rank).query_only();
            let before = self.trace.lines("Selected pinned worker").len();
            let answer = self.send_to(frontend, ask)?.answer().await?;
            ensure!(answer.status == 200, "{}: {}", answer.status, answer.body);
            let lines = self.trace.lines("Selected pinned worker");
            let found = found_blocks(&lines[before..], &prefix)?
                .with_context(|| format!("no choice was logged: {}", answer.body))?;
            Ok(if found == blocks as f64 {
                Ok(())
            } else {
                Err(format!("{found}"))
            })
        })
        .await
    }

    /// Waits until the first frontend's router knows that a prefill worker holds as many blocks of
    /// `prompt` as said. Each look is a request, which the first decode worker gets, too.
    pub(crate) async fn prefill_holds(
        &self,
        worker: &Worker,
        prompt: &[u32],
        blocks: usize,
    ) -> Result<()> {
        let what = format!("{blocks} blocks are known of {}", worker.name());
        let prefix = format!("worker_id={} dp_rank=0,", worker.id);
        until(&what, async || {
            let before = self.trace.lines("Selected pinned worker").len();
            let ask = Ask::new(prompt)
                .prefill(worker, 0)
                .decode(&self.decode[0], 0);
            self.ask(ask).await?.complete()?;
            let lines = self.trace.lines("Selected pinned worker");
            Ok(match found_blocks(&lines[before..], &prefix)? {
                Some(found) if found == blocks as f64 => Ok(()),
                found => Err(format!("{found:?}")),
            })
        })
        .await
    }

    /// Waits until a frontend's router would not send a request to a decode worker any more.
    pub(crate) async fn unrouted(&self, frontend: usize, worker: &Worker) -> Result<()> {
        let what = format!("{} is not routed to", worker.name());
        until(&what, async || {
            let ask = Ask::new(&PROBE).decode(worker, 0).query_only();
            let answer = self.send_to(frontend, ask)?.answer().await?;
            Ok(if answer.status == 200 {
                Err(answer.body)
            } else {
                Ok(())
            })
        })
        .await
    }

    /// Waits until no router has anything booked or queued.
    ///
    /// Two witnesses, since neither suffices: the gauges of loads change with a booking at once but
    /// are shared by the frontends of a process, the routers' own events come later. What was booked
    /// at a worker that is gone is forgotten with it, without an event. Two requests that end at once
    /// may leave the gauge of their worker at what was between; one more shows whether that is so.
    pub(crate) async fn nothing_booked(&self) -> Result<()> {
        let mut looks = 0;
        until("nothing is booked", async || {
            let mut booked = Vec::new();
            looks += 1;
            if looks % LOOKS_BEFORE_A_PROBE == 0 {
                for probe in probes(&present(&self.prefill), &present(&self.decode)) {
                    probe.send(&self.frontend(0)?.client).answer().await?;
                }
            }
            let metrics = self.metrics(0).await?;
            let is_shared = self.frontends.len() > 1;
            for worker in self.prefill.iter().chain(&self.decode) {
                let load = self.load_on(&metrics, worker)?;
                // One frontend's change may come after the other one removed the worker's gauge.
                if load != 0.0 && !(is_shared && worker.is_gone()) {
                    booked.push(format!("{}: a load of {load}", worker.name()));
                }
            }
            let queued = metrics.sum(QUEUED, &[("model", &self.name)])?;
            if queued != 0.0 {
                booked.push(format!("{queued} requests in a queue"));
            }
            for (key, worker) in self.ledger()?.bookings().open {
                let at = self.worker(worker);
                if !at.is_some_and(|worker| worker.is_gone()) {
                    let at = at.map_or("an unknown worker", |worker| worker.name());
                    booked.push(format!("{at}: {key:?}"));
                }
            }
            Ok(if booked.is_empty() {
                Ok(())
            } else {
                Err(booked.join("; "))
            })
        })
        .await
    }

    /// Waits until as many requests as said wait in the routers' queues.
    pub(crate) async fn queued(&self, requests: usize) -> Result<()> {
        until(&format!("{requests} requests are queued"), async || {
            let metrics = self.metrics(0).await?;
            let queued = metrics.sum(QUEUED, &[("model", &self.name)])?;
            Ok(if queued == requests as f64 {
                Ok(())
            } else {
                Err(format!("{queued}"))
            })
        })
        .await
    }

    /// Waits until the routers have a booking of `requests` requests at a worker.
    pub(crate) async fn booked(&self, worker: &Worker, requests: usize) -> Result<()> {
        let what = format!("{requests} requests are booked at {}", worker.name());
        until(&what, async || {
            let open = self.ledger()?.bookings().open;
            let found = open.values().filter(|at| **at == worker.id).count();
            Ok(if found == requests {
                Ok(())
            } else {
                Err(format!("{found}: {open:?}"))
            })
        })
        .await
    }

    fn worker(&self, id: u64) -> Option<&Worker> {
        let mut all = self.prefill.iter().chain(&self.decode);
        all.find(|worker| worker.id == id).map(Arc::as_ref)
    }

    /// The worker of a role that got the request with Dynamo's id `id`.
    pub(crate) fn worker_of(&self, role: WorkerType, id: &str) -> Option<&Worker> {
        let pool = match role {
            WorkerType::Prefill => &self.prefill,
            _ => &self.decode,
        };
        let mut pool = pool.iter();
        let got = |worker: &&Arc<Worker>| worker.received().iter().any(|got| got.id == id);
        pool.find(got).map(Arc::as_ref)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for frontend in &self.frontends {
            frontend.runtime.shutdown();
        }
    }
}

fn present(pool: &[Arc<Worker>]) -> Vec<Arc<Worker>> {
    let present = pool.iter().filter(|worker| !worker.is_gone());
    present.cloned().collect()
}

/// Requests that get to each of these workers.
fn probes(prefill: &[Arc<Worker>], decode: &[Arc<Worker>]) -> Vec<Ask> {
    let fits = |one: &Worker, other: &Worker| one.spec.zone == other.spec.zone;
    let mut probes = Vec::new();
    let mut probed = vec![false; prefill.len()];
    for (number, worker) in decode.iter().enumerate() {
        let ask = Ask::new(&PROBE).decode(worker, 0);
        let mut partners = (0..prefill.len()).map(|place| (number + place) % prefill.len());
        probes.push(
            match partners.find(|place| fits(&prefill[*place], worker)) {
                // A pin for decode alone would be taken for one for prefill too.
                Some(place) => {
                    probed[place] = true;
                    ask.prefill(&prefill[place], 0)
                }
                None => ask.query_only(),
            },
        );
    }
    for (worker, _) in prefill.iter().zip(probed).filter(|(_, probed)| !probed) {
        if let Some(partner) = decode.iter().find(|partner| fits(worker, partner)) {
            probes.push(Ask::new(&PROBE).decode(partner, 0).prefill(worker, 0));
        }
    }
    probes
}

/// The cached blocks that a logged choice of a worker names.
fn found_blocks(lines: &[Line], of: &str) -> Result<Option<f64>> {
    let Some(line) = lines.iter().find(|line| line.message().contains(of)) else {
        return Ok(None);
    };
    let (_, found) = line
        .message()
        .rsplit_once("effective cached blocks: ")
        .context("the router logs its choices in another way")?;
    Ok(Some(found.trim().parse()?))
}

/// A prompt of as many tokens as said, none of them special.
pub(crate) fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..tokens).map(|_| random.u32(100..3000)).collect()
}
