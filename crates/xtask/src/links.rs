// SPDX-License-Identifier: Apache-2.0

//! Time to the first token over a link with a rate, by what a decode worker holds of the prompt: unpatched Dynamo,
//! its conditional disaggregation, the router's share of kvdelta, and kvdelta's connector.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, project_root};
use crate::chart::{Chart, Panel, Row};
use crate::client::{Answer, Client};
use crate::demo::{FINISHED, Model, positive};
use crate::env;
use crate::fleet::{BLOCK_SIZE, Connector, EngineSetup, Fleet, MODEL, Parts, Workers};
use crate::frontend;
use crate::interrupt;
use crate::namespace::{self, Link, Rate};
use crate::progress::{Step, say};
use crate::report::{Routing, Spread, put_between};
use crate::wheel;
use crate::workers;

/// Blocks of a prompt, all whole.
pub(crate) const PROMPT_BLOCKS: usize = 64;
/// Blocks of it that one decode worker holds.
const CACHED_BLOCKS: [usize; 4] = [0, 32, 56, 63];
const DECODE_WORKERS: usize = 2;
const OUTPUT_TOKENS: usize = 8;
/// Requests in flight while prefixes are brought to the decode workers.
pub(crate) const SEEDS_AT_ONCE: usize = 4;
/// Until the router has the events of the last prefix.
pub(crate) const EVENTS_TIME: Duration = Duration::from_millis(700);
/// The connector's counters are brought up to date every few seconds.
pub(crate) const COUNTED_TIME: Duration = Duration::from_secs(12);
const WARM_UPS: usize = 10;
/// What a plain TCP stream carries to tell the rate that the link holds.
const STREAM_BYTES: usize = 8 << 20;
/// As of test programs that are skipped.
const SKIPPED: u8 = 77;
const COMMAND: &str = "cargo xtask bench links --markdown";
/// Blocks that kvdelta's connector did not offer, on a prefill worker.
pub(crate) const SKIPPED_BLOCKS: &str = "vllm:kvdelta_skipped_blocks_total";

/// Options of `cargo xtask bench links`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask bench links --quick              one rate, few requests: a look at it
  cargo xtask bench links --markdown           as in docs/links.md
  cargo xtask bench links --json links.json --ways router
  cargo xtask bench links --json links.json --resume --markdown   what is not yet in the file

The fleet and its client run in a network namespace whose loopback is shaped, which needs root and
iproute2. Without them nothing is measured: the exit code is 77, and the text says how much was skipped.")]
pub(crate) struct Options {
    /// Rates of the link, in Mbit/s or `unshaped`.
    #[arg(long, value_delimiter = ',', default_values = ["50", "200", "1000", "unshaped"])]
    rates: Vec<Rate>,
    /// Ways to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Way::ALL)]
    ways: Vec<Way>,
    /// Requests in flight at once.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4], value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: Vec<u16>,
    /// Requests measured in a cell.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=24))]
    requests: u16,
    /// Weight of the router's share and with the connector.
    #[arg(long, default_value_t = 2.0, value_parser = positive, allow_hyphen_values = true)]
    weight: f64,
    /// Seed of the prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// 200 Mbit/s, 4 in flight, 4 requests.
    #[arg(long, conflicts_with_all = ["rates", "concurrency", "requests"])]
    quick: bool,
    /// Write all figures to a file, after every way.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep what the file of --json has, and measure the rest.
    #[arg(long, requires = "json")]
    resume: bool,
    /// Write the tables into docs/links.md, and docs/links.svg.
    #[arg(long)]
    markdown: bool,
}

/// How requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// Dynamo as it is.
    Unpatched,
    /// Dynamo as it is, with conditional disaggregation.
    Conditional,
    /// Phases 1 and 2 of kvdelta, vLLM's own connector.
    Router,
    /// All of it, with kvdelta's connector.
    Connector,
}

impl Way {
    const ALL: [Self; 4] = [
        Self::Unpatched,
        Self::Conditional,
        Self::Router,
        Self::Connector,
    ];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unpatched => "unpatched",
            Self::Conditional => "conditional disagg",
            Self::Router => "router's share",
            Self::Connector => "with the connector",
        })
    }
}

/// All figures.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Report {
    setting: Setting,
    /// What a plain TCP stream got of each rate, in Mbit/s.
    streams: Vec<(Rate, f64)>,
    cells: Vec<Cell>,
}

/// What all cells of a report share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Setting {
    prompt_blocks: usize,
    block_size: usize,
    block_bytes: u64,
    decode_workers: usize,
    output_tokens: usize,
    requests: usize,
    weight: f64,
    seed: u64,
}

/// What is measured at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Key {
    rate: Rate,
    concurrency: usize,
    cached_blocks: usize,
    way: Way,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Cell {
    #[serde(flatten)]
    key: Key,
    /// Times to the first token, in milliseconds, in the order of the answers.
    ttft_ms: Vec<f64>,
    /// Bytes that the link carried meanwhile.
    link_bytes: u64,
}

/// Runs `cargo xtask bench links`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let (rates, concurrency, requests) = if options.quick {
        (vec!["200".parse().map_err(anyhow::Error::msg)?], vec![4], 4)
    } else {
        let concurrency = options.concurrency.iter().map(|&at_once| at_once.into());
        (
            options.rates.clone(),
            concurrency.collect(),
            options.requests,
        )
    };
    let keys = keys(&rates, &concurrency, &options.ways);
    if let Some(why) = namespace::missing() {
        eprintln!("skipped: all {} cells of the link grid: {why}", keys.len());
        return Ok(ExitCode::from(SKIPPED));
    }
    let setups = Setups::prepare(cache, options.ways.contains(&Way::Connector))?;
    let setting = Setting {
        prompt_blocks: PROMPT_BLOCKS,
        block_size: BLOCK_SIZE,
        block_bytes: setups.model.block_bytes(),
        decode_workers: DECODE_WORKERS,
        output_tokens: OUTPUT_TOKENS,
        requests: requests.into(),
        weight: options.weight,
        seed: options.seed,
    };
    let mut report = match &options.json {
        Some(path) if options.resume && path.exists() => Report::read(path, &setting)?,
        _ => Report {
            setting,
            streams: Vec::new(),
            cells: Vec::new(),
        },
    };
    // Before the runtime's threads, so that they are inside too; what is built and fetched is there already.
    let link = Link::enter()?;
    let json = options.json.as_deref();
    interrupt::run(cache, "links", async |folder| {
        measure(&setups, folder, &link, &keys, json, &mut report).await
    })?;
    report.cells.sort_by_key(|cell| cell.key);
    let tables = report.tables();
    print!("{tables}");
    if options.markdown {
        let docs = project_root().join("docs");
        put_between(&docs.join("links.md"), COMMAND, &tables)?;
        write(&docs.join("links.svg"), &report.chart().svg()?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn keys(rates: &[Rate], concurrency: &[usize], ways: &[Way]) -> Vec<Key> {
    let mut keys = Vec::new();
    for &way in ways {
        for &rate in rates {
            for &concurrency in concurrency {
                keys.extend(CACHED_BLOCKS.map(|cached_blocks| Key {
                    rate,
                    concurrency,
                    cached_blocks,
                    way,
                }));
            }
        }
    }
    keys
}

pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// What the fleets of all ways are made of.
#[derive(Debug)]
pub(crate) struct Setups {
    python: PathBuf,
    folder: PathBuf,
    frontend: PathBuf,
    patched: Workers,
    kvdelta: Option<Connector>,
    pub(crate) model: Model,
}

impl Setups {
    /// Makes what is missing; kvdelta's connector only if it is wanted.
    pub(crate) fn prepare(cache: &Cache, connector: bool) -> Result<Self> {
        let python = env::engines(cache)?;
        let folder = env::model(cache, &python)?;
        Ok(Self {
            model: Model::read(&folder)?,
            folder,
            frontend: frontend::build(cache, frontend::Profile::Dev)?,
            patched: Workers::Patched(workers::overlay(cache, &python)?.context(workers::NONE)?),
            kvdelta: connector
                .then(|| {
                    wheel::overlay(cache).map(|overlay| Connector::Kvdelta {
                        overlay,
                        settings: serde_json::Map::new(),
                    })
                })
                .transpose()?,
            python,
        })
    }

    /// The installed workers of Dynamo, or the patched ones.
    pub(crate) fn parts(&self, patched: bool, engines: EngineSetup) -> Parts {
        Parts {
            python: self.python.clone(),
            model: self.folder.clone(),
            frontend: self.frontend.clone(),
            workers: if patched {
                self.patched.clone()
            } else {
                Workers::Stock
            },
            engines,
        }
    }

    /// kvdelta's connector on both sides, or vLLM's.
    pub(crate) fn engines(&self, kvdelta: bool) -> Result<EngineSetup> {
        let mut engines = EngineSetup::default();
        if kvdelta {
            let connector = self
                .kvdelta
                .as_ref()
                .context("the connector was not made")?;
            engines.prefill = connector.clone();
            engines.decode = connector.clone();
        }
        Ok(engines)
    }
}

async fn measure(
    setups: &Setups,
    folder: &Path,
    link: &Link,
    keys: &[Key],
    json: Option<&Path>,
    report: &mut Report,
) -> Result<()> {
    let missing: Vec<Key> = keys
        .iter()
        .filter(|key| report.cells.iter().all(|cell| cell.key != **key))
        .copied()
        .collect();
    say(format!(
        "{} cells to measure, {} are there",
        missing.len(),
        report.cells.len()
    ));
    for key in &missing {
        if report.streams.iter().all(|(rate, _)| *rate != key.rate) {
            link.set_rate(key.rate)?;
            let seconds = link.stream(STREAM_BYTES)?.as_secs_f64();
            let mbit = STREAM_BYTES as f64 * 8.0 / 1e6 / seconds;
            report.streams.push((key.rate, mbit));
        }
    }
    for way in Way::ALL {
        let part: Vec<Key> = missing
            .iter()
            .filter(|key| key.way == way)
            .copied()
            .collect();
        if part.is_empty() {
            continue;
        }
        let folder = folder.join(format!("{way:?}").to_lowercase());
        let cells = measure_way(setups, &folder, link, way, &part, &report.setting).await?;
        report.cells.extend(cells);
        if let Some(path) = json {
            write(path, &(serde_json::to_string_pretty(report)? + "\n")).context("--json")?;
        }
    }
    Ok(())
}

async fn measure_way(
    setups: &Setups,
    folder: &Path,
    link: &Link,
    way: Way,
    keys: &[Key],
    setting: &Setting,
) -> Result<Vec<Cell>> {
    let client = Client::new(MODEL)?;
    let patched = way >= Way::Router;
    let mut engines = setups.engines(way == Way::Connector)?;
    // Without shared memory: what moves, moves over the loopback.
    engines.transports = Some("tcp,self");
    link.set_rate(Rate::Unshaped)?;
    let mut fleet = Fleet::start(
        &setups.parts(patched, engines),
        folder,
        &client,
        1,
        DECODE_WORKERS,
    )?;
    let routing = Routing {
        weight: if patched { setting.weight } else { 0.0 },
        conditional_disagg: way == Way::Conditional,
    };
    fleet.start_frontend(routing, None).await?;
    let base = fleet.base()?.to_owned();
    let vocabulary = setups.model.vocab_size;
    warm_up(&client, &mut fleet, vocabulary).await?;
    let step = Step::begin(format!("{way}: {} cells", keys.len()));
    let mut cells = Vec::new();
    for key in keys {
        let (seeds, prompts) = prompts(key, setting, vocabulary);
        link.set_rate(Rate::Unshaped)?;
        send(&client, &base, &seeds, SEEDS_AT_ONCE, 2).await?;
        tokio::time::sleep(EVENTS_TIME).await;
        link.set_rate(key.rate)?;
        let before = link.bytes()?;
        let answers = send(&client, &base, &prompts, key.concurrency, OUTPUT_TOKENS).await;
        fleet.check()?;
        let cell = Cell {
            key: *key,
            ttft_ms: answers?
                .iter()
                .map(|answer| answer.ttft.as_secs_f64() * 1e3)
                .collect(),
            link_bytes: link.bytes()? - before,
        };
        say(format!(
            "{way}, {}, {} at once, {} of {PROMPT_BLOCKS} blocks cached: {} ms, {:.2} MB a request",
            key.rate,
            key.concurrency,
            key.cached_blocks,
            Spread::of(cell.ttft_ms.clone()).shown(0),
            cell.megabytes()
        ));
        cells.push(cell);
    }
    step.end();
    link.set_rate(Rate::Unshaped)?;
    if way == Way::Connector {
        skipped_blocks(&client, &fleet).await?;
    }
    Ok(cells)
}

/// Blocks that the connector has skipped on the prefill workers; none is an error, since then nothing of it
/// was measured.
pub(crate) async fn skipped_blocks(client: &Client, fleet: &Fleet) -> Result<f64> {
    tokio::time::sleep(COUNTED_TIME).await;
    let mut skipped = 0.0;
    for base in fleet.prefill_bases() {
        skipped += client.metric(base, SKIPPED_BLOCKS).await?.unwrap_or(0.0);
    }
    ensure!(
        skipped > 0.0,
        "kvdelta's connector skipped no block: no claim reached it"
    );
    say(format!("kvdelta's connector skipped {skipped} blocks"));
    Ok(skipped)
}

/// Sends prompts that nobody holds until every decode worker has had one: the first one of a pair of workers
/// makes their connections.
pub(crate) async fn warm_up(client: &Client, fleet: &mut Fleet, vocabulary: u32) -> Result<()> {
    let step = Step::begin("warm-up");
    let base = fleet.base()?.to_owned();
    let mut random = fastrand::Rng::with_seed(u64::MAX);
    for _ in 0..WARM_UPS {
        let prompts: Vec<Vec<u32>> = (0..SEEDS_AT_ONCE)
            .map(|_| draw(&mut random, PROMPT_BLOCKS * BLOCK_SIZE, vocabulary))
            .collect();
        send(client, &base, &prompts, SEEDS_AT_ONCE, OUTPUT_TOKENS).await?;
        fleet.check()?;
        let finished = fleet.decode_counters(FINISHED).await?;
        if finished
            .iter()
            .all(|count| count.is_some_and(|count| count > 0.0))
        {
            step.end();
            return Ok(());
        }
    }
    anyhow::bail!(
        "a decode worker got none of {} requests",
        WARM_UPS * SEEDS_AT_ONCE
    )
}

/// The answers in the order in which they end, `at_once` in flight all the time.
pub(crate) async fn send(
    client: &Client,
    base: &str,
    prompts: &[Vec<u32>],
    at_once: usize,
    output_tokens: usize,
) -> Result<Vec<Answer>> {
    stream::iter(prompts)
        .map(|prompt| client.complete(base, prompt, output_tokens))
        .buffer_unordered(at_once)
        .try_collect()
        .await
}

/// The prompts that bring a cell's prefixes to the decode workers, and those that are measured. The same in all ways.
fn prompts(key: &Key, setting: &Setting, vocabulary: u32) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let rate = match key.rate {
        Rate::Mbit(mbit) => u64::from(mbit.get()),
        Rate::Unshaped => 0,
    };
    let cell = rate << 32 | (key.concurrency as u64) << 16 | key.cached_blocks as u64;
    let mut random = fastrand::Rng::with_seed(setting.seed.rotate_left(48) ^ cell);
    prefixed(&mut random, setting.requests, key.cached_blocks, vocabulary)
}

/// `count` prompts of [`PROMPT_BLOCKS`] whose first blocks nobody else has, and before them prompts that have these
/// and one token more.
pub(crate) fn prefixed(
    random: &mut fastrand::Rng,
    count: usize,
    cached_blocks: usize,
    vocabulary: u32,
) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let (mut seeds, mut prompts) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let prefix = draw(random, cached_blocks * BLOCK_SIZE, vocabulary);
        let rest = (PROMPT_BLOCKS - cached_blocks) * BLOCK_SIZE;
        if cached_blocks > 0 {
            seeds.push([prefix.clone(), draw(random, 1, vocabulary)].concat());
        }
        prompts.push([prefix, draw(random, rest, vocabulary)].concat());
    }
    (seeds, prompts)
}

fn draw(random: &mut fastrand::Rng, count: usize, vocabulary: u32) -> Vec<u32> {
    (0..count)
        .map(|_| random.u32(crate::workload::FIRST_WORD..vocabulary))
        .collect()
}

/// The share of a prompt that so many blocks are.
pub(crate) fn share(blocks: usize) -> String {
    match blocks {
        0 => "none".to_owned(),
        blocks if blocks + 1 == PROMPT_BLOCKS => "all but one block".to_owned(),
        blocks => {
            let (mut part, mut whole) = (blocks, PROMPT_BLOCKS);
            while part.is_multiple_of(2) && whole.is_multiple_of(2) {
                (part, whole) = (part / 2, whole / 2);
            }
            format!("{part}/{whole}")
        }
    }
}

impl Cell {
    fn megabytes(&self) -> f64 {
        self.link_bytes as f64 / 1e6 / self.ttft_ms.len().max(1) as f64
    }
}

impl Report {
    fn read(path: &Path, setting: &Setting) -> Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
        let report: Self =
            serde_json::from_str(&text).with_context(|| format!("--resume: {shown}"))?;
        ensure!(
            report.setting == *setting,
            "--resume: {shown} has other settings: {:?}, not {setting:?}",
            report.setting
        );
        Ok(report)
    }

    /// The values that the cells have of something, in order.
    fn values<T: PartialEq + Copy>(&self, of: impl Fn(&Key) -> T) -> Vec<T> {
        let mut values = Vec::new();
        for cell in &self.cells {
            let value = of(&cell.key);
            if !values.contains(&value) {
                values.push(value);
            }
        }
        values
    }

    fn cell(&self, key: Key) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.key == key)
    }

    fn ways(&self) -> Vec<Way> {
        let mut ways = self.values(|key| key.way);
        ways.sort();
        ways
    }

    fn tables(&self) -> String {
        let (ways, setting) = (self.ways(), &self.setting);
        let held: Vec<String> = self
            .streams
            .iter()
            .map(|(rate, mbit)| format!("{rate}: {mbit:.0}"))
            .collect();
        let mut out = format!(
            "`cargo xtask bench links --requests {} --weight {} --seed {}`: 1 prefill and {} decode workers, \
             prompts of {} tokens ({:.2} MB of KV). A plain TCP stream got, in Mbit/s: {}.\n\n",
            setting.requests,
            setting.weight,
            setting.seed,
            setting.decode_workers,
            setting.prompt_blocks * setting.block_size,
            (setting.block_bytes * setting.prompt_blocks as u64) as f64 / 1e6,
            held.join(", "),
        );
        out += "Time to the first token in milliseconds, median and quartiles:\n\n| link | in flight | cached |";
        head(&mut out, 2, &ways);
        for rate in self.values(|key| key.rate) {
            for concurrency in self.values(|key| key.concurrency) {
                for cached_blocks in CACHED_BLOCKS {
                    let _ = write!(out, "| {rate} | {concurrency} | {} |", share(cached_blocks));
                    for &way in &ways {
                        let key = Key {
                            rate,
                            concurrency,
                            cached_blocks,
                            way,
                        };
                        let cell = self.cell(key).map_or_else(
                            || "-".to_owned(),
                            |cell| Spread::of(cell.ttft_ms.clone()).shown(0),
                        );
                        let _ = write!(out, " {cell} |");
                    }
                    out.push('\n');
                }
            }
        }
        out += "\nMegabytes on the link a request, HTTP and control traffic with it, mean over the rates:\n\n| in flight | cached |";
        head(&mut out, 1, &ways);
        for concurrency in self.values(|key| key.concurrency) {
            for cached_blocks in CACHED_BLOCKS {
                let _ = write!(out, "| {concurrency} | {} |", share(cached_blocks));
                for &way in &ways {
                    let of = |key: &Key| {
                        (key.concurrency, key.cached_blocks, key.way)
                            == (concurrency, cached_blocks, way)
                    };
                    let cells = self.cells.iter().filter(|cell| of(&cell.key));
                    let all: Vec<f64> = cells.map(Cell::megabytes).collect();
                    let _ = write!(out, " {:.2} |", all.iter().sum::<f64>() / all.len() as f64);
                }
                out.push('\n');
            }
        }
        out
    }

    fn chart(&self) -> Chart {
        let ways = self.ways();
        let panel = |rate: Rate, concurrency| Panel {
            title: rate.to_string(),
            categories: CACHED_BLOCKS
                .map(|blocks| share(blocks).replace(" block", ""))
                .into(),
            values: ways
                .iter()
                .map(|&way| {
                    let spread = |cached_blocks| {
                        let key = Key {
                            rate,
                            concurrency,
                            cached_blocks,
                            way,
                        };
                        let cell = self.cell(key)?;
                        Some(Spread::of(cell.ttft_ms.clone()).0)
                    };
                    CACHED_BLOCKS.map(spread).into()
                })
                .collect(),
        };
        let rows = self.values(|key| key.concurrency).into_iter();
        Chart {
            title: format!(
                "Time to the first token of {} tokens over a shaped loopback: median and quartiles",
                self.setting.prompt_blocks * self.setting.block_size
            ),
            category: "cached on one of two decode workers".to_owned(),
            series: ways.iter().map(Way::to_string).collect(),
            rows: rows
                .map(|concurrency| Row {
                    measure: format!("ms, {concurrency} in flight"),
                    logarithmic: true,
                    panels: self
                        .values(|key| key.rate)
                        .into_iter()
                        .map(|rate| panel(rate, concurrency))
                        .collect(),
                })
                .collect(),
        }
    }
}

/// The columns of the ways, and the line below the head of a table with so many columns of figures before them
/// and one of text.
fn head(out: &mut String, figures: usize, ways: &[Way]) {
    for way in ways {
        let _ = write!(out, " {way} |");
    }
    *out += "\n|";
    *out += &" --: |".repeat(figures);
    *out += " --- |";
    *out += &" --: |".repeat(ways.len());
    out.push('\n');
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
        let words = std::iter::once(&"links").chain(arguments);
        Ok(Command::try_parse_from(words)?.options)
    }

    fn report() -> Report {
        let options = parse(&["--rates", "unshaped,50", "--concurrency", "4"]).unwrap();
        let mut cells: Vec<Cell> = keys(&options.rates, &[4], &options.ways)
            .into_iter()
            .map(|key| Cell {
                key,
                ttft_ms: vec![10.0 + key.cached_blocks as f64, 30.0, 20.0],
                link_bytes: 3_000_000,
            })
            .collect();
        cells.sort_by_key(|cell| cell.key);
        Report {
            setting: Setting {
                prompt_blocks: PROMPT_BLOCKS,
                block_size: BLOCK_SIZE,
                block_bytes: 131_072,
                decode_workers: DECODE_WORKERS,
                output_tokens: OUTPUT_TOKENS,
                requests: 3,
                weight: 2.0,
                seed: 1,
            },
            streams: vec![("50".parse().unwrap(), 47.1)],
            cells,
        }
    }

    #[test]
    fn the_whole_grid_is_asked_for_by_default() {
        let options = parse(&[]).unwrap();
        let keys = keys(&options.rates, &[1, 4], &options.ways);
        assert_eq!(keys.len(), 4 * 4 * 2 * 4);
        assert!(parse(&["--rates", "0"]).is_err());
        assert!(parse(&["--quick", "--requests", "3"]).is_err());
        assert!(parse(&["--resume"]).is_err());
    }

    #[test]
    fn a_prompt_begins_with_what_was_sent_before_and_no_other_does() {
        let report = report();
        for cell in report
            .cells
            .iter()
            .filter(|cell| cell.key.way == Way::Router)
        {
            let (seeds, prompts) = prompts(&cell.key, &report.setting, 4096);
            let cached = cell.key.cached_blocks * BLOCK_SIZE;
            assert_eq!(seeds.len(), if cached == 0 { 0 } else { 3 });
            for (seed, prompt) in seeds.iter().zip(&prompts) {
                assert_eq!(seed[..cached], prompt[..cached]);
                assert_eq!(seed.len(), cached + 1);
            }
            assert!(prompts.iter().all(|prompt| prompt.len() == 2048));
            assert_ne!(prompts[0][..BLOCK_SIZE], prompts[1][..BLOCK_SIZE]);
        }
    }

    #[test]
    fn every_way_gets_the_same_prompts() {
        let report = report();
        let of = |way| {
            let key = Key {
                way,
                ..report.cells[0].key
            };
            prompts(&key, &report.setting, 4096)
        };
        assert_eq!(of(Way::Unpatched), of(Way::Connector));
    }

    #[test]
    fn shares_are_named() {
        assert_eq!(
            CACHED_BLOCKS.map(share),
            ["none", "1/2", "7/8", "all but one block"]
        );
    }

    #[test]
    fn the_tables_have_a_row_a_cell_and_the_chart_a_point() {
        let report = report();
        let tables = report.tables();
        assert!(
            tables.contains("| 50 Mbit/s | 4 | 7/8 | 30 (30..66) |"),
            "{tables}"
        );
        assert!(
            tables.contains("| 4 | none | 1.00 | 1.00 | 1.00 | 1.00 |"),
            "{tables}"
        );
        let (slow, fast) = (tables.find("| 50 Mbit/s"), tables.find("| unshaped"));
        assert!(slow < fast, "{tables}");
        let svg = report.chart().svg().unwrap();
        assert_eq!(svg.matches("<circle").count(), 4 + 2 * 4 * 4);
    }

    #[test]
    fn a_file_of_other_settings_is_not_added_to() {
        let report = report();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("links.json");
        fs::write(&path, serde_json::to_string(&report).unwrap()).unwrap();
        let read = Report::read(&path, &report.setting).unwrap();
        assert_eq!(read.cells.len(), report.cells.len());
        assert_eq!(read.cells[5].key, report.cells[5].key);
        let other = Setting {
            requests: 4,
            ..report.setting
        };
        let error = Report::read(&path, &other).unwrap_err().to_string();
        assert!(error.contains("other settings"), "{error}");
    }
}
