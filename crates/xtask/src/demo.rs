// SPDX-License-Identifier: Apache-2.0

//! The main job: the same requests with the flag off and on, real workers, bytes and outputs.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use futures_util::future::try_join_all;
use serde::Deserialize;
use tokio::sync::{Mutex, Semaphore};

use crate::cache::{Cache, project_root};
use crate::client::{Answer, Client, grown};
use crate::counts::Standing;
use crate::env;
use crate::fleet::{
    self, Aggregated, BLOCK_SIZE, DISCOVERY, EngineSetup, Fleet, MAX_TOKENS, MODEL, Parts, Workers,
};
use crate::frontend;
use crate::interrupt;
use crate::outputs::{Reference, Tally, Verdict, compare};
use crate::ports::check_port;
use crate::progress::{Step, say};
use crate::report::{Kill, Measured, Report, Routing, Run, median};
use crate::wheel;
use crate::workers;
use crate::workload::{self, Planned, Shape, Workload};

/// Bytes that NIXL moved into a decode worker.
const MOVED_BYTES: &str = "vllm:nixl_bytes_transferred_sum";
/// Requests that a worker finished.
pub(crate) const FINISHED: &str = "vllm:request_success_total";
/// The counters are brought up to date every few seconds.
const SETTLE: Duration = Duration::from_secs(6);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(180);
/// Requests of one run; their prompts are held in memory.
const MAX_REQUESTS: usize = 20_000;
/// How long requests may fail after a worker was killed, until the router has dropped it.
const RETRY_TIMEOUT: Duration = Duration::from_secs(120);
/// When the worker is killed after requests began to be sent: one of them is on its way.
const KILL_DELAY: Duration = Duration::from_millis(60);
/// What the router logs when it cannot take the blocks of a worker that left out of its index.
const NOT_CLEARED: &str = "Failed to clear";
/// Requests sent to a fleet whose killed worker is back.
const RESTART_REQUESTS: usize = 8;
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// In the order in which they are sent.
const WORKLOADS: [Workload; 2] = [Workload::SharedPrefixes, Workload::Conversation];
/// Between two requests of a trace, of which each ends before the next one begins.
const TRACE_GAP_MS: usize = 10_000;

/// Options of `cargo xtask demo`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  cargo xtask demo
  cargo xtask demo --decode 4 --concurrency 4 --conditional-disagg
  cargo xtask demo --prefixes 8 --requests-per-prefix 4 --turns 0 --json run.json
  cargo xtask demo --kill-decode

Each prefill or decode worker takes about 2 GiB of memory, and up to minutes to start.
Exit code 0: every answer is that of one aggregated worker; 1: not so, or it failed.")]
pub(crate) struct Options {
    /// Prefill workers.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) prefill: u16,
    /// Decode workers.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) decode: u16,
    /// Distinct prefixes, and conversations.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) prefixes: u16,
    /// Requests that share each prefix.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) requests_per_prefix: u16,
    /// Tokens of a prefix, and of the document that opens a conversation.
    #[arg(long, default_value_t = 2048, value_name = "TOKENS")]
    pub(crate) prefix_tokens: u16,
    /// New tokens of each request, and of each turn.
    #[arg(long, default_value_t = 100, value_name = "TOKENS", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) new_tokens: u16,
    /// Turns of each conversation; 0 leaves conversations out.
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub(crate) turns: u16,
    /// Tokens of each answer.
    #[arg(long, default_value_t = 32, value_name = "TOKENS", value_parser = clap::value_parser!(u16).range(2..))]
    pub(crate) output_tokens: u16,
    /// Requests in flight at once.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) concurrency: u16,
    /// Seed of the requests.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// decode_overlap_score_weight of the second run and of the connector's, above 0; the first run has 0.
    #[arg(long, default_value_t = 2.0, value_name = "WEIGHT", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) weight: f64,
    /// Log-probability margin below which two tokens count as tied.
    #[arg(long, default_value_t = 0.001, value_name = "MARGIN", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) epsilon: f64,
    /// Leave out the run with kvdelta's connector on prefill and decode workers.
    #[arg(long)]
    pub(crate) no_connector: bool,
    /// Also run Dynamo's own conditional disaggregation, with weight 0.
    #[arg(long)]
    pub(crate) conditional_disagg: bool,
    /// Also kill a decode worker in the middle of requests, and start it again.
    #[arg(long)]
    pub(crate) kill_decode: bool,
    /// Run the workers with the patched Python packages in place of the installed ones, as those with kvdelta's
    /// connector always do.
    #[arg(long)]
    pub(crate) patched_workers: bool,
    /// Also ask `kvdelta doctor` about every run.
    #[arg(long)]
    pub(crate) doctor: bool,
    /// Port of the frontend; a free one when left out.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) http_port: Option<u16>,
    /// Write the requests as a trace for `kvdelta replay` to this file, as far apart as requests that are sent one
    /// after the other.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Write the result as JSON to this file; `-` for standard output in place of the table.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// A finite number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("must be a finite number above 0".to_owned()),
    }
}

impl Options {
    fn shape(&self) -> Shape {
        Shape {
            prefixes: self.prefixes.into(),
            requests_per_prefix: self.requests_per_prefix.into(),
            prefix_tokens: self.prefix_tokens.into(),
            new_tokens: self.new_tokens.into(),
            turns: self.turns.into(),
            output_tokens: self.output_tokens.into(),
            seed: self.seed,
        }
    }

    /// The requests that are sent before and after a worker is killed: other prefixes.
    fn kill_shape(&self) -> Shape {
        Shape {
            turns: 0,
            seed: self.seed.wrapping_add(1),
            ..self.shape()
        }
    }

    /// The requests that are sent when it is back: no worker has their prefixes, and with several
    /// in flight load brings some to it.
    fn restart_shape(&self) -> Shape {
        Shape {
            prefixes: RESTART_REQUESTS,
            requests_per_prefix: 1,
            seed: self.seed.wrapping_add(2),
            ..self.kill_shape()
        }
    }

    /// How the runs route, and whether their workers have kvdelta's connector.
    fn columns(&self) -> Vec<(Routing, bool)> {
        let routing = |weight, conditional_disagg| Routing {
            weight,
            conditional_disagg,
        };
        let mut columns = vec![
            (routing(0.0, false), false),
            (routing(self.weight, false), false),
        ];
        if !self.no_connector {
            columns.push((routing(self.weight, false), true));
        }
        if self.conditional_disagg {
            columns.push((routing(0.0, true), false));
        }
        columns
    }

    fn validate(&self) -> Result<()> {
        let longest_tokens = self.shape().longest_tokens();
        if longest_tokens > MAX_TOKENS {
            bail!(
                "the longest prompt with its answer has {longest_tokens} tokens, the workers take \
                 {MAX_TOKENS}: lower --prefix-tokens, --new-tokens, --output-tokens or --turns"
            );
        }
        let requests = self.shape().requests();
        if requests > MAX_REQUESTS {
            bail!(
                "{requests} requests are more than the {MAX_REQUESTS} that fit into memory: lower \
                 --prefixes, --requests-per-prefix or --turns"
            );
        }
        if self.kill_decode && self.decode < 2 {
            bail!("--kill-decode needs --decode 2 or more, so that requests can go elsewhere");
        }
        Ok(())
    }
}

/// Runs `cargo xtask demo`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let to_stdout = options.json.as_deref() == Some(Path::new("-"));
    // Made first: a path that cannot be written must not cost the result, nor a run that fails an
    // earlier one.
    let json = match &options.json {
        Some(path) if !to_stdout => Some((path, beside(path)?)),
        _ => None,
    };
    let report = measure(cache, options)?;
    let text = serde_json::to_string_pretty(&report)?;
    if to_stdout {
        println!("{text}");
    } else {
        print!("{}", report.table());
    }
    if let Some((path, mut file)) = json {
        writeln!(file, "{text}")?;
        file.persist(path)
            .with_context(|| format!("--json: cannot write {}", path.display()))?;
    }
    Ok(if report.outputs_are_right() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// A temporary file in the folder of `path`.
fn beside(path: &Path) -> Result<tempfile::NamedTempFile> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))
        .with_context(|| format!("--json: cannot write {}", path.display()))
}

/// Sets up what is missing and does the main job.
pub(crate) fn measure(cache: &Cache, options: &Options) -> Result<Report> {
    options.validate()?;
    fleet::check_memory((options.prefill + options.decode).into())?;
    if let Some(port) = options.http_port {
        check_port(port)?;
    }
    let began = Instant::now();
    let python = env::engines(cache)?;
    let patched = match options.patched_workers || !options.no_connector {
        true => Workers::Patched(workers::overlay(cache, &python)?.context(workers::NONE)?),
        false => Workers::Stock,
    };
    let parts = Parts {
        model: env::model(cache, &python)?,
        frontend: frontend::build(cache, frontend::Profile::Dev)?,
        workers: match options.patched_workers {
            true => patched.clone(),
            false => Workers::Stock,
        },
        python,
        engines: EngineSetup::default(),
    };
    let connected = match options.no_connector {
        true => parts.clone(),
        false => with_connector(&parts, patched, cache)?,
    };
    say(format!("set-up: {:.1} s", began.elapsed().as_secs_f64()));
    let began = Instant::now();
    let runs = cache.folder("runs")?;
    let folder = tempfile::Builder::new().prefix("run-").tempdir_in(&runs)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        // Dropping the job ends every process that it started.
        tokio::select! {
            result = job(&parts, &connected, folder.path(), options) => result,
            error = interrupt::asked() => Err(error),
        }
    });
    if result.is_ok() {
        say(format!("main job: {:.1} s", began.elapsed().as_secs_f64()));
    } else {
        say(format!("logs are kept in {}", folder.keep().display()));
    }
    result
}

/// `parts` with kvdelta's connector in all workers, which it needs to be `patched` ones.
fn with_connector(parts: &Parts, patched: Workers, cache: &Cache) -> Result<Parts> {
    let connector = wheel::connector(cache)?;
    Ok(Parts {
        workers: patched,
        engines: EngineSetup {
            prefill: connector.clone(),
            decode: connector,
            ..parts.engines.clone()
        },
        ..parts.clone()
    })
}

/// A request with its prompt and the aggregated worker's answer.
#[derive(Debug)]
struct Request {
    workload: Workload,
    lane: usize,
    prompt: Vec<u32>,
    reference: Reference,
}

async fn job(parts: &Parts, connected: &Parts, folder: &Path, options: &Options) -> Result<Report> {
    let client = Client::new(MODEL)?;
    let model = Model::read(&parts.model)?;
    let plan = workload::plan(&options.shape(), model.vocab_size);

    let aggregated = Aggregated::start(parts, folder, &client).await?;
    let requests = references(&client, aggregated.base(), &plan, options).await?;
    let mut kill_requests = Vec::new();
    if options.kill_decode {
        for shape in [options.kill_shape(), options.restart_shape()] {
            let plan = workload::plan(&shape, model.vocab_size);
            kill_requests.push(references(&client, aggregated.base(), &plan, options).await?);
        }
    }
    drop(aggregated);

    if let Some(path) = &options.trace {
        let sent: Vec<(&[u32], usize)> = WORKLOADS
            .iter()
            .flat_map(|workload| requests.iter().filter(|it| it.workload == *workload))
            .map(|request| (request.prompt.as_slice(), request.reference.tokens.len()))
            .collect();
        fs::write(path, workload::trace(&sent, BLOCK_SIZE, TRACE_GAP_MS))
            .with_context(|| format!("--trace: cannot write {}", path.display()))?;
    }
    let mut runs = Vec::new();
    let mut answers = Vec::new();
    for (index, (routing, connector)) in options.columns().into_iter().enumerate() {
        let with = if connector {
            ", kvdelta's connector"
        } else {
            ""
        };
        say(format!("run {}: {routing}{with}", index + 1));
        let folder = folder.join(format!("run-{}", index + 1));
        let mut fleet = Fleet::start(
            if connector { connected } else { parts },
            &folder,
            &client,
            options.prefill.into(),
            options.decode.into(),
        )?;
        fleet.start_frontend(routing, options.http_port).await?;
        let mut workloads = Vec::new();
        let mut answered = HashMap::new();
        for workload in WORKLOADS {
            let part: Vec<(usize, &Request)> = requests
                .iter()
                .enumerate()
                .filter(|(_, request)| request.workload == workload)
                .collect();
            if !part.is_empty() {
                let (measured, found) =
                    workload_run(&client, &mut fleet, workload, &part, &model, options).await?;
                say(measured.to_string());
                workloads.push(measured);
                answered.extend(found);
            }
        }
        let decode_events = fleet.decode_events().await?;
        let doctor = if options.doctor {
            Some(doctor(&folder.join(DISCOVERY), fleet.base()?)?)
        } else {
            None
        };
        let kill = match kill_requests.as_slice() {
            [first, others] if routing.weight > 0.0 => {
                Some(kill_run(&client, &mut fleet, [first, others], options).await?)
            }
            _ => None,
        };
        drop(fleet);
        runs.push(Run {
            routing,
            connector,
            decode_events,
            doctor,
            workloads,
            kill,
        });
        answers.push(answered);
    }
    let equal_between_runs = (0..requests.len())
        .filter(|index| {
            let mut found = answers.iter().map(|answers| answers.get(index));
            let first = found.next();
            found.all(|answer| Some(answer) == first)
        })
        .count();
    Ok(Report {
        prefill_workers: options.prefill.into(),
        decode_workers: options.decode.into(),
        concurrency: options.concurrency.into(),
        seed: options.seed,
        block_size: BLOCK_SIZE,
        block_bytes: model.block_bytes(),
        epsilon: options.epsilon,
        runs,
        equal_between_runs,
    })
}

/// The codes of what `kvdelta doctor` finds wrong or cannot read.
fn doctor(discovery: &Path, frontend: &str) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Report {
        findings: Vec<Finding>,
    }
    #[derive(Deserialize)]
    struct Finding {
        severity: String,
        code: String,
    }
    let step = Step::begin("kvdelta doctor");
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["run", "--quiet", "--locked", "--package", "kvdelta", "--"])
        .args(["doctor", "--json", "--frontend", frontend, "--file-kv"])
        .arg(discovery)
        .current_dir(project_root());
    // It ends with 1 when it finds something.
    let output = command.stdin(Stdio::null()).output()?;
    let report: Report = serde_json::from_slice(&output.stdout).with_context(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("kvdelta doctor ended with {}: {errors}", output.status)
    })?;
    step.end();
    Ok(report
        .findings
        .into_iter()
        .filter(|finding| ["problem", "unknown"].contains(&finding.severity.as_str()))
        .map(|finding| finding.code)
        .collect())
}

/// Asks the aggregated worker, one request at a time; later turns contain its answers, so that
/// every run sends the same prompts.
async fn references(
    client: &Client,
    base: &str,
    plan: &[Planned],
    options: &Options,
) -> Result<Vec<Request>> {
    let mut step = Step::begin(format!("{} reference answers", plan.len()));
    let mut before: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
    let mut requests = Vec::new();
    for (index, planned) in plan.iter().enumerate() {
        let prompt = workload::prompt(plan, index, &before);
        let reference = client
            .reference(base, &prompt, options.output_tokens.into())
            .await
            .with_context(|| format!("reference answer {index}"))?;
        before.push((prompt.clone(), reference.tokens.clone()));
        requests.push(Request {
            workload: planned.workload,
            lane: planned.lane,
            prompt,
            reference,
        });
        step.tick(&format!("({} of {})", index + 1, plan.len()));
    }
    step.end();
    Ok(requests)
}

/// Sends `requests` and measures what moved meanwhile.
async fn workload_run(
    client: &Client,
    fleet: &mut Fleet,
    workload: Workload,
    requests: &[(usize, &Request)],
    model: &Model,
    options: &Options,
) -> Result<(Measured, HashMap<usize, Vec<u32>>)> {
    let standing = Standing::read(client, fleet).await?;
    let moved_before = or_zero(&fleet.decode_counters(MOVED_BYTES).await?);
    let finished_before = or_zero(&fleet.decode_counters(FINISHED).await?);
    let step = Step::begin(format!("{} requests ({workload})", requests.len()));
    let base = fleet.base()?.to_owned();
    let answers = send_all(requests, options.concurrency.into(), |request| {
        client.complete(&base, &request.prompt, options.output_tokens.into())
    })
    .await;
    // A dead worker explains a failed request better than the request's own error.
    fleet.check()?;
    let answers = answers?;
    step.end();
    let (moved, finished) = settled(fleet, &finished_before, requests.len()).await?;
    let counts = Standing::read(client, fleet).await?.since(&standing);

    let verdicts: Vec<(usize, Verdict)> = requests
        .iter()
        .map(|(index, request)| {
            let verdict = compare(&request.reference, &answers[index].tokens, options.epsilon);
            (*index, verdict)
        })
        .collect();
    let prompts: Vec<&[u32]> = requests
        .iter()
        .map(|(_, request)| request.prompt.as_slice())
        .collect();
    let with_answers: Vec<(&[u32], &[u32])> = requests
        .iter()
        .map(|(_, request)| {
            let answer = request.reference.tokens.as_slice();
            (request.prompt.as_slice(), answer)
        })
        .collect();
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    let measured = Measured {
        workload,
        requests: requests.len(),
        prompt_tokens: prompts.iter().map(|prompt| prompt.len()).sum(),
        full_bytes: workload::full_transfer_blocks(&prompts, BLOCK_SIZE) * model.block_bytes(),
        once_bytes: workload::once_blocks(&with_answers, BLOCK_SIZE) * model.block_bytes(),
        moved_bytes: grown(&moved_before, &moved).iter().sum(),
        decode_requests: grown(&finished_before, &finished),
        counts,
        ttft_ms: median(answers.values().map(|answer| ms(answer.ttft)).collect()),
        inter_token_ms: median(
            answers
                .values()
                .filter_map(|answer| answer.inter_token)
                .map(ms)
                .collect(),
        ),
        outputs: Tally::of(verdicts.iter().map(|(_, verdict)| verdict)),
        not_equal: verdicts
            .into_iter()
            .filter(|(_, verdict)| *verdict != Verdict::Equal)
            .collect(),
    };
    let tokens = answers
        .into_iter()
        .map(|(index, answer)| (index, answer.tokens))
        .collect();
    Ok((measured, tokens))
}

/// Sends requests at most `concurrency` at once, those of a lane in order, and returns the answers
/// by index.
async fn send_all<'a, F>(
    requests: &[(usize, &'a Request)],
    concurrency: usize,
    send: impl Fn(&'a Request) -> F,
) -> Result<HashMap<usize, Answer>>
where
    F: Future<Output = Result<Answer>>,
{
    let slots = Semaphore::new(concurrency);
    let mut lanes: HashMap<usize, Arc<Mutex<()>>> = HashMap::new();
    let sending = requests.iter().map(|(index, request)| {
        let lane = Arc::clone(lanes.entry(request.lane).or_default());
        let (slots, send) = (&slots, &send);
        async move {
            let _turn = lane.lock().await;
            let _slot = slots.acquire().await?;
            let answer = send(request)
                .await
                .with_context(|| format!("request {index}"))?;
            Ok::<_, anyhow::Error>((*index, answer))
        }
    });
    Ok(try_join_all(sending).await?.into_iter().collect())
}

/// The byte and request counters of the decode workers, after all requests are counted and the
/// bytes have not changed for [`SETTLE`].
async fn settled(
    fleet: &mut Fleet,
    finished_before: &[f64],
    requests: usize,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let mut step = Step::begin("until the workers have counted all bytes");
    let deadline = Instant::now() + SETTLE_TIMEOUT;
    let mut last = Vec::new();
    let mut since = Instant::now();
    loop {
        fleet.check()?;
        let counters = fleet.decode_counters(MOVED_BYTES).await?;
        let moved = or_zero(&counters);
        let finished = or_zero(&fleet.decode_counters(FINISHED).await?);
        if moved != last {
            last.clone_from(&moved);
            since = Instant::now();
        }
        let counted: u64 = grown(finished_before, &finished).iter().sum();
        if counted == requests as u64 && since.elapsed() >= SETTLE {
            if counters.iter().all(Option::is_none) {
                bail!("no decode worker has the counter {MOVED_BYTES}");
            }
            step.end();
            return Ok((moved, finished));
        }
        if Instant::now() > deadline {
            bail!(
                "after {} s the decode workers count {counted} of {requests} requests",
                SETTLE_TIMEOUT.as_secs()
            );
        }
        step.tick(&format!("({counted} of {requests} requests counted)"));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// A worker has a counter only once it has something to count.
fn or_zero(counters: &[Option<f64>]) -> Vec<f64> {
    counters
        .iter()
        .map(|counter| counter.unwrap_or(0.0))
        .collect()
}

/// Sends half of the first requests, kills the decode worker that finished most of them while the
/// other half is being sent, starts it again, and then sends the others.
async fn kill_run(
    client: &Client,
    fleet: &mut Fleet,
    [first, others]: [&[Request]; 2],
    options: &Options,
) -> Result<Kill> {
    let base = fleet.base()?.to_owned();
    let failed = AtomicUsize::new(0);
    let send = async |part: &[Request], concurrency: usize| {
        let part: Vec<(usize, &Request)> = part.iter().enumerate().collect();
        let answers = send_all(&part, concurrency, |request| {
            with_retries(client, &base, request, options, &failed)
        })
        .await?;
        let verdicts = part.iter().map(|(index, request)| {
            compare(&request.reference, &answers[index].tokens, options.epsilon)
        });
        Ok::<_, anyhow::Error>(verdicts.collect::<Vec<Verdict>>())
    };
    let concurrency: usize = options.concurrency.into();
    let (before, after) = first.split_at(first.len() / 2);
    let finished_before = or_zero(&fleet.decode_counters(FINISHED).await?);
    let mut verdicts = send(before, concurrency).await?;
    tokio::time::sleep(SETTLE).await;
    let finished = or_zero(&fleet.decode_counters(FINISHED).await?);
    let (killed, _) = grown(&finished_before, &finished)
        .into_iter()
        .enumerate()
        .max_by_key(|(_, finished)| *finished)
        .context("there is no decode worker")?;
    let sources_before = fleet.event_sources().await?;
    let killing = async {
        tokio::time::sleep(KILL_DELAY).await;
        fleet.kill_decode(killed)
    };
    let (sent, killing) = tokio::join!(send(after, concurrency), killing);
    killing?;
    verdicts.extend(sent?);
    fleet.ready("the router drops the killed worker").await?;
    let sources_without = fleet
        .event_sources_until(sources_before.saturating_sub(1))
        .await?;
    fleet.restart_decode(killed)?;
    fleet.ready("the killed worker is back").await?;
    verdicts.extend(send(others, RESTART_REQUESTS).await?);
    tokio::time::sleep(SETTLE).await;
    fleet.check()?;
    // A restarted worker counts from 0.
    let finished = or_zero(&fleet.decode_counters(FINISHED).await?);
    Ok(Kill {
        requests: verdicts.len(),
        failed_attempts: failed.load(Ordering::Relaxed),
        event_sources: [
            sources_before,
            sources_without,
            fleet.event_sources_until(sources_before).await?,
        ],
        index_was_cleared: !fleet.frontend_log()?.contains(NOT_CLEARED),
        requests_after_restart: grown(&vec![0.0; finished.len()], &finished)[killed],
        outputs: Tally::of(&verdicts),
    })
}

/// The answer to `request`, asked again while a killed worker may still be chosen.
async fn with_retries(
    client: &Client,
    base: &str,
    request: &Request,
    options: &Options,
    failed: &AtomicUsize,
) -> Result<Answer> {
    let deadline = Instant::now() + RETRY_TIMEOUT;
    loop {
        let answer = client
            .complete(base, &request.prompt, options.output_tokens.into())
            .await;
        match answer {
            Err(error) if Instant::now() < deadline => {
                failed.fetch_add(1, Ordering::Relaxed);
                say(format!("a request failed and is sent again: {error:#}"));
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// What the byte counts need of the model.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct Model {
    /// Token ids.
    pub(crate) vocab_size: u32,
    num_hidden_layers: u64,
    num_key_value_heads: u64,
    head_dim: u64,
    torch_dtype: String,
}

impl Model {
    /// From its folder.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let model: Self = serde_json::from_str(&text)
            .with_context(|| format!("cannot understand {}", path.display()))?;
        if model.torch_dtype != "float32" {
            bail!(
                "{}: dtype {} is not float32",
                path.display(),
                model.torch_dtype
            );
        }
        Ok(model)
    }

    /// Keys and values of one block over all layers.
    pub(crate) fn block_bytes(&self) -> u64 {
        let values = 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim;
        values * size_of::<f32>() as u64 * BLOCK_SIZE as u64
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }

    fn parse(arguments: &[&str]) -> Result<Options, clap::Error> {
        let words = std::iter::once(&"demo").chain(arguments);
        Ok(Command::try_parse_from(words)?.options)
    }

    #[test]
    fn a_bad_weight_is_refused_with_option_and_value() {
        for value in ["-1", "0", "NaN", "inf", "", "1,5", "high"] {
            for arguments in [
                &[&format!("--weight={value}")[..]][..],
                &["--weight", value],
            ] {
                let error = parse(arguments).unwrap_err();
                assert_eq!(error.exit_code(), 2);
                let error = error.to_string();
                assert!(error.contains("--weight"), "{error}");
                assert!(error.contains("a finite number above 0"), "{error}");
                assert!(error.contains(&format!("'{value}'")), "{error}");
            }
        }
    }

    #[test]
    fn prompts_that_the_workers_cannot_take_are_refused() {
        assert!(parse(&[]).unwrap().validate().is_ok());
        let error = parse(&["--prefix-tokens", "9000"]).unwrap().validate();
        assert!(error.unwrap_err().to_string().contains("8192"));
        let error = parse(&["--decode", "1", "--kill-decode"])
            .unwrap()
            .validate();
        assert!(error.unwrap_err().to_string().contains("--kill-decode"));
    }

    #[test]
    fn a_block_of_the_test_model_has_131_072_bytes() {
        let model = Model {
            vocab_size: 4096,
            num_hidden_layers: 4,
            num_key_value_heads: 2,
            head_dim: 64,
            torch_dtype: "float32".into(),
        };
        assert_eq!(model.block_bytes(), 131_072);
    }

    #[tokio::test]
    async fn lanes_keep_their_order_and_concurrency_its_bound() {
        let requests: Vec<Request> = (0..12)
            .map(|index| Request {
                workload: Workload::Conversation,
                lane: index % 3,
                prompt: vec![u32::try_from(index).unwrap()],
                reference: Reference {
                    tokens: Vec::new(),
                    rivals: Vec::new(),
                },
            })
            .collect();
        let numbered: Vec<(usize, &Request)> = requests.iter().enumerate().collect();
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let order = std::sync::Mutex::new(Vec::new());
        let answers = send_all(&numbered, 2, |request| {
            let (running, most, order) = (&running, &most, &order);
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                order.lock().unwrap().push(request.prompt[0]);
                running.fetch_sub(1, Ordering::SeqCst);
                Ok(Answer {
                    tokens: request.prompt.clone(),
                    ttft: Duration::ZERO,
                    inter_token: None,
                })
            }
        })
        .await
        .unwrap();
        assert_eq!(answers.len(), 12);
        assert_eq!(most.load(Ordering::SeqCst), 2);
        let order = order.into_inner().unwrap();
        for lane in 0..3 {
            let lane: Vec<u32> = order.iter().copied().filter(|id| id % 3 == lane).collect();
            assert!(lane.is_sorted(), "{order:?}");
        }
    }
}
