// SPDX-License-Identifier: Apache-2.0

//! vLLM servers that can be killed and come back as another kind of engine on the same ports.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kvdelta_indexer::WorkerRank;
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::sync::watch;

use crate::client::Client;
use crate::command::tail;
use crate::faults::plan::Connector;
use crate::fleet::{self, ENGINE_OPTIONS, MODEL, Process, START_TIMEOUT, api_server, kv_events};
use crate::ports::free_ports;
use crate::progress::{Step, say};

/// Bytes of one block of the test model.
const BLOCK_BYTES: usize = 128 << 10;
const POLL: Duration = Duration::from_millis(250);
/// Leases of 30 s have to end.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(150);

/// What every engine of a run has.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Python of the engines' environment.
    pub(crate) python: PathBuf,
    /// Folder of the test model.
    pub(crate) model: PathBuf,
    /// Where `kvdelta`, `kvdelta_vllm` and the connector with the hooks are.
    pub(crate) python_path: Vec<PathBuf>,
    /// Where logs go.
    pub(crate) folder: PathBuf,
}

/// What an engine is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Prefill,
    Decode,
}

/// What an engine is in all its lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) role: Role,
    /// Its id in the index and in claims.
    pub(crate) number: u64,
    /// Tensor-parallel ranks.
    pub(crate) ranks: usize,
    /// Blocks of KV.
    pub(crate) blocks: usize,
    /// Longest prompt with its answer.
    pub(crate) max_tokens: usize,
    /// Whether stale claims always end in asking prefill again; else the connector chooses.
    pub(crate) asks_again: bool,
}

/// What an engine is until it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) connector: Connector,
    /// Seconds; `None`: vLLM's default.
    pub(crate) lease: Option<u64>,
}

/// A kind, and the number of the life in which an engine has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    /// Whether it answers. It may have died since.
    pub(crate) up: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    http: u16,
    side_channel: u16,
    events: u16,
    replay: u16,
}

/// An engine, over its lives.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) name: String,
    /// Its rank in the index.
    pub(crate) of: WorkerRank,
    spec: Spec,
    ports: Ports,
    base: String,
    setup: Setup,
    client: Client,
    process: Mutex<Option<Process>>,
    life: watch::Sender<Life>,
}

impl Engine {
    /// Starts one; see [`Self::ready`].
    pub(crate) fn start(setup: &Setup, client: &Client, spec: Spec, kind: Kind) -> Result<Self> {
        let [http, side_channel, events, replay] = free_ports()?;
        let role = match spec.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        let life = Life {
            number: 0,
            kind,
            up: false,
        };
        let engine = Self {
            name: format!("{role}-{}", spec.number),
            of: WorkerRank::new(spec.number, 0),
            spec,
            ports: Ports {
                http,
                side_channel,
                events,
                replay,
            },
            base: format!("http://127.0.0.1:{http}"),
            setup: setup.clone(),
            client: client.clone(),
            process: Mutex::new(None),
            life: watch::Sender::new(life),
        };
        engine.spawn(kind)?;
        Ok(engine)
    }

    fn spawn(&self, kind: Kind) -> Result<()> {
        let kv_role = match self.spec.role {
            Role::Prefill => "kv_producer",
            Role::Decode => "kv_consumer",
        };
        let mut extra = serde_json::Map::new();
        if let Some(seconds) = kind.lease {
            extra.insert("kv_lease_duration".to_owned(), json!(seconds));
        }
        if self.spec.asks_again {
            extra.insert("kvdelta_recovery".to_owned(), json!("ask_again"));
        }
        let mut connector = json!({
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": extra,
        });
        if kind.connector == Connector::Own {
            connector["kv_connector_module_path"] = json!("fault_connector");
        }
        let (ports, ranks) = (self.ports, self.spec.ranks);
        let mut command = api_server(&self.setup.python, &self.setup.model, ports.http);
        command
            .args(ENGINE_OPTIONS)
            .args(["--max-model-len", &self.spec.max_tokens.to_string()])
            .arg("--kv-cache-memory-bytes")
            .arg((self.spec.blocks * BLOCK_BYTES / ranks).to_string())
            .args(["--kv-transfer-config", &connector.to_string()])
            .args(["--kv-events-config", &kv_events(ports.events, ports.replay)])
            .env("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
            .env(
                "VLLM_NIXL_SIDE_CHANNEL_PORT",
                ports.side_channel.to_string(),
            )
            .env("UCX_TLS", "tcp,sm,self")
            .env("PYTHONPATH", std::env::join_paths(&self.setup.python_path)?);
        if ranks > 1 {
            command
                .args(["--tensor-parallel-size", &ranks.to_string()])
                .args(["--distributed-executor-backend", "mp"]);
        }
        let process = Process::spawn(&self.name, command, &self.setup.folder)?;
        *self.process() = Some(process);
        Ok(())
    }

    /// Waits until it answers.
    pub(crate) async fn ready(&self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        let health = format!("{}/health", self.base());
        while self.client.get(&health).await.is_err() {
            self.process()
                .as_mut()
                .map_or(Ok(()), Process::check_start)?;
            if Instant::now() > deadline {
                bail!(
                    "{} is not up; its log ends:\n{}",
                    self.name,
                    self.log_tail()
                );
            }
            tokio::time::sleep(POLL).await;
        }
        if let Some(process) = self.process().as_ref() {
            process.calm(self.spec.ranks);
        }
        self.life.send_modify(|life| life.up = true);
        Ok(())
    }

    /// Kills it at once, as a crash would; [`Self::revive`] starts it again.
    pub(crate) fn kill(&self) {
        self.life.send_modify(|life| {
            life.up = false;
            life.number += 1;
        });
        if let Some(process) = self.process().as_ref() {
            process.signal(Signal::SIGKILL);
        }
        say(format!("killed {}", self.name));
    }

    /// Starts it again as `kind` after [`Self::kill`].
    pub(crate) async fn revive(&self, kind: Kind) -> Result<()> {
        let dead = self.process().take();
        if let Some(mut dead) = dead {
            tokio::task::spawn_blocking(move || fleet::stop(std::slice::from_mut(&mut dead)))
                .await?;
        }
        self.life.send_modify(|life| life.kind = kind);
        self.spawn(kind)?;
        self.ready().await?;
        say(format!("{} is back: {kind:?}", self.name));
        Ok(())
    }

    /// An error with the tail of its log if it has ended.
    pub(crate) fn check(&self) -> Result<()> {
        self.process().as_mut().map_or(Ok(()), Process::check)
    }

    fn process(&self) -> std::sync::MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which life it is in.
    pub(crate) fn life(&self) -> Life {
        *self.life.borrow()
    }

    /// Waits until it answers in some life.
    pub(crate) async fn up(&self) {
        // The sender lives as long as this does.
        let _ = self.life.subscribe().wait_for(|life| life.up).await;
    }

    /// Its tensor-parallel ranks.
    pub(crate) const fn ranks(&self) -> usize {
        self.spec.ranks
    }

    /// Where it listens.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Where its KV events are: publisher and replay.
    pub(crate) fn events(&self) -> [String; 2] {
        [self.ports.events, self.ports.replay].map(|port| format!("tcp://127.0.0.1:{port}"))
    }

    /// Sends it a prompt of one token, so that it takes a step: notices are read, events and gauges go out.
    pub(crate) async fn nudge(&self) -> Result<()> {
        let body = json!({"model": MODEL, "prompt": [4], "max_tokens": 1, "temperature": 0});
        let url = format!("{}/v1/completions", self.base());
        self.client.send(&url, &body).await?;
        Ok(())
    }

    /// Gauges that are not 0 after a step of its own: blocks in use, requests.
    async fn left(&self) -> Result<Vec<String>> {
        self.check()?;
        self.nudge().await?;
        let mut left = Vec::new();
        for name in [
            "vllm:kv_cache_usage_perc",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
        ] {
            let value = self.client.metric(self.base(), name).await?;
            let value = value.with_context(|| format!("{} has no {name}", self.name))?;
            if value != 0.0 {
                left.push(format!("{}: {name} {value}", self.name));
            }
        }
        Ok(left)
    }

    /// The end of its log.
    pub(crate) fn log_tail(&self) -> String {
        tail(&self.log())
    }

    /// Its log, of all lives.
    pub(crate) fn log(&self) -> PathBuf {
        log(&self.setup.folder, &self.name)
    }
}

/// Waits until all blocks are free and no request is left; what is not as at the start.
pub(crate) async fn settle(engines: &[&Engine]) -> Result<Vec<String>> {
    let mut progress = Step::begin("until all blocks are free");
    let deadline = Instant::now() + SETTLE_TIMEOUT;
    loop {
        let mut left = Vec::new();
        for engine in engines {
            left.extend(engine.left().await?);
        }
        if left.is_empty() || Instant::now() > deadline {
            progress.end();
            return Ok(left);
        }
        progress.tick(&format!("({})", left.join(", ")));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn log(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log"))
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(mut process) = self.process().take() {
            fleet::stop(std::slice::from_mut(&mut process));
        }
    }
}
