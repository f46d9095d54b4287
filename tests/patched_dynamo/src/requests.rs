// SPDX-License-Identifier: Apache-2.0

//! Measures requests over HTTP through a whole frontend whose workers answer at once.

mod worker;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dynamo_llm::entrypoint::RouterConfig;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::Runtime;
use dynamo_runtime::pipeline::RouterMode;
use kvdelta_recorder::deployment::{distributed, free_port, serve};
use kvdelta_recorder::settings::{Settings, VOCABULARY};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;

use worker::Worker;

const MODEL: &str = "requests";
const PREFILL_WORKERS: usize = 2;
const DECODE_WORKERS: usize = 8;
/// Prompts that begin alike share this many beginnings.
const PREFIXES: usize = 8;
const LIMIT: Duration = Duration::from_secs(60);
/// The frontend's histogram of its decode query; unpatched ones have none.
const QUERY_SUM: &str = "router_decode_query_seconds_sum";
const QUERY_COUNT: &str = "router_decode_query_seconds_count";
/// KV events are published without an answer.
const UNTIL_INDEXED: Duration = Duration::from_millis(300);

/// One kind of requests, and how long they took.
#[derive(Debug, Serialize)]
pub(crate) struct Case {
    /// Requests at once.
    concurrency: usize,
    /// Tokens of each prompt.
    tokens: usize,
    /// From the first request to the last answer, in seconds.
    seconds: f64,
    /// Of each request, in microseconds.
    latencies: Vec<f64>,
    /// Requests that prefill workers were sent.
    prefills: usize,
    /// Of these, with a claim.
    claims: usize,
    /// The frontend's own mean time of its decode query, in microseconds; `None`: it has no such metric.
    query: Option<f64>,
}

/// Sends `count` requests of each kind.
pub(crate) fn measure(
    settings: &Settings,
    model: &Path,
    seed: u64,
    count: usize,
) -> Result<Vec<Case>> {
    let runtime = Runtime::from_settings()?;
    runtime.primary().block_on(async {
        let mut stack = Stack::start(settings, &runtime, model, seed).await?;
        let cases = stack.run(count).await;
        stack.workers.iter().for_each(Worker::stop);
        cases
    })
}

/// A deployment in this process.
struct Stack {
    random: fastrand::Rng,
    _folder: tempfile::TempDir,
    workers: Vec<Worker>,
    client: Client,
}

/// Who sends requests.
#[derive(Clone)]
struct Client {
    http: reqwest::Client,
    address: Arc<str>,
}

impl Stack {
    async fn start(
        settings: &Settings,
        runtime: &Runtime,
        model: &Path,
        seed: u64,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut workers = Vec::new();
        let prefill = std::iter::repeat_n(WorkerType::Prefill, PREFILL_WORKERS);
        let decode = std::iter::repeat_n(WorkerType::Decode, DECODE_WORKERS);
        for role in prefill.chain(decode) {
            let part = distributed(runtime, folder.path()).await?;
            workers.push(Worker::start(part, role, model).await?);
        }
        let frontend = distributed(runtime, folder.path()).await?;
        let port = free_port()?;
        let router = RouterConfig::new(RouterMode::KV, settings.config());
        serve(frontend, router, None, port).await?;
        Ok(Self {
            random: fastrand::Rng::with_seed(seed),
            _folder: folder,
            workers,
            client: Client {
                http: reqwest::Client::new(),
                address: format!("http://127.0.0.1:{port}").into(),
            },
        })
    }

    async fn run(&mut self, count: usize) -> Result<Vec<Case>> {
        self.wait_until_served().await?;
        let mut cases = Vec::new();
        for concurrency in [1, 16] {
            for tokens in [2_048, 8_192] {
                let all: Vec<_> = (0..PREFIXES).map(|_| self.tokens(tokens / 2)).collect();
                // So that the beginnings are cached, and what is made once is made.
                let warm: Vec<_> = (0..2)
                    .flat_map(|_| &all)
                    .map(|prefix| self.body(prefix, tokens))
                    .collect();
                self.ask(concurrency, warm).await?;
                tokio::time::sleep(UNTIL_INDEXED).await;
                let bodies = (0..count).map(|place| self.body(&all[place % PREFIXES], tokens));
                let bodies = bodies.collect();
                let (before, asked) = (self.prefills(), self.client.queries().await?);
                let began = Instant::now();
                let latencies = self.ask(concurrency, bodies).await?;
                let seconds = began.elapsed().as_secs_f64();
                let (prefills, claims) = self.prefills();
                let queries = self.client.queries().await?;
                let [spent, count] = [queries.0 - asked.0, queries.1 - asked.1];
                cases.push(Case {
                    concurrency,
                    tokens,
                    seconds,
                    latencies,
                    prefills: prefills - before.0,
                    claims: claims - before.1,
                    query: (count > 0.0).then(|| spent / count * 1e6),
                });
            }
        }
        Ok(cases)
    }

    /// Asks every worker until it has answered.
    async fn wait_until_served(&self) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        let body = json!({ "model": MODEL, "prompt": [100, 101, 102], "max_tokens": 3 });
        let body = body.to_string();
        let first = |role| self.workers.iter().find(|worker| worker.role() == role);
        for worker in &self.workers {
            // Neither is pinned without the other.
            let [prefill, decode] = [WorkerType::Prefill, WorkerType::Decode].map(|role| {
                if worker.role() == role {
                    Some(worker)
                } else {
                    first(role)
                }
            });
            let pin = [
                ("x-dynamo-prefill-instance-id", prefill),
                ("x-dynamo-worker-instance-id", decode),
            ];
            let pin =
                pin.map(|(name, of)| (name, of.map(|of| of.id().to_string()).unwrap_or_default()));
            while worker.seen().0 == 0 {
                let answer = self.client.ask(body.clone(), &pin).await;
                if let Err(error) = answer {
                    ensure!(Instant::now() < deadline, "no answer: {error:#}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        Ok(())
    }

    /// Requests that prefill workers were sent, and how many had a claim.
    fn prefills(&self) -> (usize, usize) {
        let prefill = self.workers.iter();
        let prefill = prefill.filter(|worker| worker.role() == WorkerType::Prefill);
        let seen = prefill.map(Worker::seen);
        seen.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    }

    /// Sends all requests, `concurrency` at once. Microseconds of each.
    async fn ask(&self, concurrency: usize, bodies: Vec<String>) -> Result<Vec<f64>> {
        let bodies = Arc::new(Mutex::new(bodies));
        let mut senders = JoinSet::new();
        for _ in 0..concurrency {
            let (client, bodies) = (self.client.clone(), bodies.clone());
            senders.spawn(async move {
                let mut latencies = Vec::new();
                loop {
                    let body = bodies.lock().unwrap_or_else(PoisonError::into_inner).pop();
                    let Some(body) = body else {
                        return anyhow::Ok(latencies);
                    };
                    let began = Instant::now();
                    client.ask(body, &[]).await?;
                    latencies.push(began.elapsed().as_secs_f64() * 1e6);
                }
            });
        }
        let mut all = Vec::new();
        while let Some(latencies) = senders.join_next().await {
            all.extend(latencies??);
        }
        Ok(all)
    }

    /// A request whose prompt begins with `prefix` and goes on as no other.
    fn body(&mut self, prefix: &[u32], tokens: usize) -> String {
        let rest = self.tokens(tokens - prefix.len());
        let prompt = [prefix, &rest].concat();
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": 3 });
        body.to_string()
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        let tokens = (0..count).map(|_| self.random.u32(100..VOCABULARY));
        tokens.collect()
    }
}

impl Client {
    async fn ask(&self, body: String, headers: &[(&str, String)]) -> Result<()> {
        let mut post = self
            .http
            .post(format!("{}/v1/completions", self.address))
            .body(body);
        post = post.header("content-type", "application/json");
        for (name, value) in headers {
            post = post.header(*name, value);
        }
        let answer = post.send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        ensure!(status.is_success(), "{status}: {text}");
        Ok(())
    }

    /// Seconds that the frontend has spent on decode queries, and how many there were.
    async fn queries(&self) -> Result<(f64, f64)> {
        let metrics = self.http.get(format!("{}/metrics", self.address));
        let text = metrics.send().await?.text().await?;
        Ok([QUERY_SUM, QUERY_COUNT]
            .map(|name| total(&text, name))
            .into())
    }
}

/// The sum of a metric over its labels.
fn total(metrics: &str, name: &str) -> f64 {
    let values = metrics.lines().filter_map(|line| {
        let (labelled, value) = line.rsplit_once(' ')?;
        let named = labelled.split('{').next()?;
        named.ends_with(name).then(|| value.parse::<f64>().ok())?
    });
    values.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels() {
        let metrics = "# HELP a_query_seconds_sum of it\na_query_seconds_sum{worker=\"1\"} 0.5\n\
                       a_query_seconds_sum{worker=\"2\"} 1e-1\na_query_seconds_count 7\n";
        assert_eq!(total(metrics, "query_seconds_sum"), 0.6);
        assert_eq!(total(metrics, "query_seconds_count"), 7.0);
        assert_eq!(total(metrics, "others"), 0.0);
    }
}
