// SPDX-License-Identifier: Apache-2.0

//! Time to the first token over a link with a rate, by what a decode worker holds of the prompt: unpatched Dynamo,
//! its conditional disaggregation, the router's share of kvdelta, and kvdelta's connector.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, project_root};
use crate::chart::{Chart, Panel, Row};
use crate::client::Client;
use crate::demo::positive;
use crate::fleet::{BLOCK_SIZE, Fleet, MODEL};
use crate::grid::{
    EVENTS_TIME, PROMPT_BLOCKS, SEEDS_AT_ONCE, Setups, check_skipped_blocks, prefixed, send, share,
    warm_up, write,
};
use crate::interrupt;
use crate::namespace::{self, Link, Rate};
use crate::progress::{Step, say};
use crate::report::{Routing, Spread, put_between};

/// Blocks of a prompt that one decode worker holds.
const CACHED_BLOCKS: [usize; 4] = [0, 32, 56, 63];
const DECODE_WORKERS: usize = 2;
const OUTPUT_TOKENS: usize = 8;
/// What a plain TCP stream carries to tell the rate that the link holds.
const STREAM_BYTES: usize = 8 << 20;
/// As of test programs that are skipped.
const SKIPPED: u8 = 77;
const COMMAND: &str = "cargo xtask bench links --markdown";

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
        check_skipped_blocks(&client, &fleet).await?;
    }
    Ok(cells)
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
        let rates = self.values(|key| key.rate);
        let rates: Vec<String> = rates
            .iter()
            .map(|rate| match rate {
                Rate::Mbit(mbit) => mbit.to_string(),
                Rate::Unshaped => rate.to_string(),
            })
            .collect();
        let concurrency = self.values(|key| key.concurrency);
        let concurrency: Vec<String> = concurrency.iter().map(usize::to_string).collect();
        let mut out = format!(
            "`cargo xtask bench links --rates {} --concurrency {} --requests {} --weight {} --seed {}`: 1 prefill and {} decode workers, \
             prompts of {} tokens ({:.2} MB of KV). A plain TCP stream got, in Mbit/s: {}.\n\n",
            rates.join(","),
            concurrency.join(","),
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
mod tests;
