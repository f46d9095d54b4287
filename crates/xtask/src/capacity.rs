// SPDX-License-Identifier: Apache-2.0

//! Prefills a second while decode is behind, by the prefill worker's KV memory, with vLLM's connector and with
//! kvdelta's.
//!
//! The decode worker runs few requests at once and each takes long, so that the others wait for it with their
//! blocks pinned on the prefill worker.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use crate::cache::{Cache, project_root};
use crate::chart::{Chart, Panel, Row};
use crate::client::Client;
use crate::demo::{FINISHED, positive};
use crate::fleet::{Fleet, MODEL};
use crate::grid::{
    EVENTS_TIME, PROMPT_BLOCKS, SEEDS_AT_ONCE, Setups, check_skipped_blocks, prefixed, send, share,
    warm_up, write,
};
use crate::interrupt;
use crate::progress::{Step, say};
use crate::report::{Routing, Spread, put_between};

/// Blocks of a prompt that the decode worker holds.
const CACHED_BLOCKS: [usize; 2] = [0, 56];
/// Requests that the decode worker runs at once.
const DECODE_AT_ONCE: usize = 2;
const OUTPUT_TOKENS: usize = 192;
/// A prompt with its answer, in whole blocks.
const MAX_MODEL_LEN: usize = 2304;
/// Blocks of a prefill worker beside those of the prompts: one is vLLM's null block.
const SPARE_BLOCKS: usize = 8;
const POLL: Duration = Duration::from_millis(100);
/// Until the workers have nothing left of a burst.
const IDLE_TIME: Duration = Duration::from_secs(2);
const COMMAND: &str = "cargo xtask bench capacity --markdown";
const USAGE: &str = "vllm:kv_cache_usage_perc";
const WAITED: &str = "vllm:request_queue_time_seconds_sum";

/// Options of `cargo xtask bench capacity`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask bench capacity --quick           one size of memory, one burst: a look at it
  cargo xtask bench capacity --markdown        as in docs/links.md")]
pub(crate) struct Options {
    /// KV memory of the prefill worker, in prompts of 2,048 tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [3, 6, 12], value_parser = clap::value_parser!(u16).range(2..=31))]
    prompts: Vec<u16>,
    /// Bursts of a cell.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Requests of a burst, all sent at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=24))]
    requests: u16,
    /// decode_overlap_score_weight, with either connector.
    #[arg(long, default_value_t = 2.0, value_parser = positive, allow_hyphen_values = true)]
    weight: f64,
    /// Seed of the prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Memory of 3 prompts, one burst.
    #[arg(long, conflicts_with_all = ["prompts", "rounds"])]
    quick: bool,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table into docs/links.md, and docs/capacity.svg.
    #[arg(long)]
    markdown: bool,
}

/// The bursts of one size of memory with one connector.
#[derive(Debug, Serialize)]
struct Cell {
    /// Of the prefill worker.
    memory_prompts: usize,
    cached_blocks: usize,
    /// kvdelta's on both workers, or vLLM's.
    kvdelta: bool,
    bursts: Vec<Burst>,
}

/// One burst.
#[derive(Debug, Clone, Copy, Serialize)]
struct Burst {
    /// Until the prefill worker had done its last prompt.
    prefills_per_second: f64,
    /// Mean time that a prompt waited at the prefill worker.
    waited_s: f64,
    /// The most of its KV memory that was in use.
    peak_usage: f64,
    /// Until the last answer had ended.
    seconds: f64,
}

/// Runs `cargo xtask bench capacity`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let setups = Setups::prepare(cache, true)?;
    let mut cells = Vec::new();
    interrupt::run(cache, "capacity", async |folder| {
        cells = measure(&setups, folder, options).await?;
        Ok(())
    })?;
    let table = table(&cells, options);
    print!("{table}");
    if let Some(path) = &options.json {
        write(path, &(serde_json::to_string_pretty(&cells)? + "\n")).context("--json")?;
    }
    if options.markdown {
        let docs = project_root().join("docs");
        put_between(&docs.join("links.md"), COMMAND, &table)?;
        write(&docs.join("capacity.svg"), &chart(&cells).svg()?)?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure(setups: &Setups, folder: &Path, options: &Options) -> Result<Vec<Cell>> {
    let (memories, rounds) = if options.quick {
        (vec![3], 1)
    } else {
        (options.prompts.clone(), options.rounds)
    };
    let client = Client::new(MODEL)?;
    let mut cells = Vec::new();
    for memory_prompts in memories.into_iter().map(usize::from) {
        for kvdelta in [false, true] {
            let name = if kvdelta { "kvdelta" } else { "stock" };
            let folder = folder.join(format!("{memory_prompts}-{name}"));
            let mut engines = setups.engines(kvdelta)?;
            let blocks = memory_prompts * PROMPT_BLOCKS + SPARE_BLOCKS;
            let bytes = blocks as u64 * setups.model.block_bytes();
            engines.options = vec![format!("--max-model-len={MAX_MODEL_LEN}")];
            engines.prefill_options = vec![format!("--kv-cache-memory-bytes={bytes}")];
            engines.decode_options = vec![format!("--max-num-seqs={DECODE_AT_ONCE}")];
            let parts = setups.parts(true, engines);
            let mut fleet = Fleet::start(&parts, &folder, &client, 1, 1)?;
            let routing = Routing {
                weight: options.weight,
                conditional_disagg: false,
            };
            fleet.start_frontend(routing, None).await?;
            let vocabulary = setups.model.vocab_size;
            warm_up(&client, &mut fleet, vocabulary).await?;
            for cached_blocks in CACHED_BLOCKS {
                let step = Step::begin(format!(
                    "{name} connector, memory of {memory_prompts} prompts, {} cached",
                    share(cached_blocks)
                ));
                let mut bursts = Vec::new();
                for round in 0..rounds {
                    let cell = (memory_prompts << 16 | cached_blocks << 8) as u64;
                    let mut random = fastrand::Rng::with_seed(
                        options.seed.rotate_left(48) ^ cell ^ u64::from(round),
                    );
                    let (seeds, prompts) = prefixed(
                        &mut random,
                        options.requests.into(),
                        cached_blocks,
                        vocabulary,
                    );
                    let base = fleet.base()?.to_owned();
                    send(&client, &base, &seeds, SEEDS_AT_ONCE, 2).await?;
                    tokio::time::sleep(IDLE_TIME + EVENTS_TIME).await;
                    let burst = burst(&client, &mut fleet, &prompts).await?;
                    say(format!(
                        "burst of {:.1} s: {:.2} prefills a second, {:.1} s waited at P, KV up to {:.0}% used",
                        burst.seconds,
                        burst.prefills_per_second,
                        burst.waited_s,
                        burst.peak_usage * 100.0
                    ));
                    bursts.push(burst);
                }
                step.end();
                cells.push(Cell {
                    memory_prompts,
                    cached_blocks,
                    kvdelta,
                    bursts,
                });
            }
            if kvdelta {
                check_skipped_blocks(&client, &fleet).await?;
            }
        }
    }
    Ok(cells)
}

/// Sends all prompts at once, and watches the prefill worker meanwhile.
async fn burst(client: &Client, fleet: &mut Fleet, prompts: &[Vec<u32>]) -> Result<Burst> {
    let base = fleet.base()?.to_owned();
    let prefill = fleet.prefill_bases().next();
    let prefill = prefill.context("there is no prefill worker")?.to_owned();
    let metric =
        async |name| Ok::<_, anyhow::Error>(client.metric(&prefill, name).await?.unwrap_or(0.0));
    let (done_before, waited_before) = (metric(FINISHED).await?, metric(WAITED).await?);
    let count = prompts.len() as f64;
    let began = Instant::now();
    let watching = async {
        let mut peak_usage = 0.0_f64;
        loop {
            let done = metric(FINISHED).await? - done_before;
            peak_usage = peak_usage.max(metric(USAGE).await?);
            if done >= count {
                return Ok::<_, anyhow::Error>((began.elapsed(), peak_usage));
            }
            tokio::time::sleep(POLL).await;
        }
    };
    let answering = send(client, &base, prompts, prompts.len(), OUTPUT_TOKENS);
    let watched = tokio::try_join!(answering, watching);
    fleet.check()?;
    let (answers, (prefilled, peak_usage)) = watched?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(
        answers
            .iter()
            .all(|answer| answer.tokens.len() == OUTPUT_TOKENS),
        "an answer has not {OUTPUT_TOKENS} tokens"
    );
    Ok(Burst {
        prefills_per_second: count / prefilled.as_secs_f64(),
        waited_s: (metric(WAITED).await? - waited_before) / count,
        peak_usage,
        seconds,
    })
}

impl Cell {
    fn spread(&self, of: impl Fn(&Burst) -> f64) -> Spread {
        Spread::of(self.bursts.iter().map(of))
    }
}

fn name(kvdelta: bool) -> &'static str {
    if kvdelta { "kvdelta's" } else { "vLLM's" }
}

fn table(cells: &[Cell], options: &Options) -> String {
    let bursts = cells.first().map_or(0, |cell| cell.bursts.len());
    let mut out = format!(
        "`cargo xtask bench capacity --rounds {bursts} --requests {} --weight {} --seed {}`: 1 prefill and 1 decode \
         worker, bursts of {} prompts of 2,048 tokens with prefixes of their own; the decode worker runs \
         {DECODE_AT_ONCE} requests of {OUTPUT_TOKENS} tokens at once. Medians of the bursts; in brackets the \
         quartiles.\n\n",
        options.requests, options.weight, options.seed, options.requests
    );
    out += "| P's memory, prompts | cached on D | connector | prefills a second | waited at P, s | P's peak usage | whole burst, s |\n";
    out += "| --: | --- | --- | --: | --: | --: | --: |\n";
    for cell in sorted(cells) {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {:.0}% | {} |",
            cell.memory_prompts,
            share(cell.cached_blocks),
            name(cell.kvdelta),
            cell.spread(|burst| burst.prefills_per_second).shown(2),
            cell.spread(|burst| burst.waited_s).shown(1),
            cell.spread(|burst| burst.peak_usage * 100.0).0[0],
            cell.spread(|burst| burst.seconds).shown(1),
        );
    }
    out
}

fn sorted(cells: &[Cell]) -> Vec<&Cell> {
    let mut sorted: Vec<&Cell> = cells.iter().collect();
    sorted.sort_by_key(|cell| (cell.memory_prompts, cell.cached_blocks, cell.kvdelta));
    sorted
}

fn chart(cells: &[Cell]) -> Chart {
    let cells = sorted(cells);
    let mut memories: Vec<usize> = cells.iter().map(|cell| cell.memory_prompts).collect();
    memories.dedup();
    let row = |measure: &str, of: fn(&Burst) -> f64| Row {
        measure: measure.to_owned(),
        logarithmic: false,
        panels: CACHED_BLOCKS
            .map(|cached_blocks| Panel {
                title: format!("{} cached on D", share(cached_blocks)),
                categories: memories.iter().map(usize::to_string).collect(),
                values: [false, true]
                    .map(|kvdelta| {
                        let find = |memory: &usize| {
                            let key = (*memory, cached_blocks, kvdelta);
                            let of_key = |cell: &&&Cell| {
                                (cell.memory_prompts, cell.cached_blocks, cell.kvdelta) == key
                            };
                            Some(cells.iter().find(of_key)?.spread(of).0)
                        };
                        memories.iter().map(find).collect()
                    })
                    .into(),
            })
            .into(),
    };
    Chart {
        title: "A prefill worker while decode is behind: median and quartiles".to_owned(),
        category: "P's KV memory, prompts".to_owned(),
        series: [false, true]
            .map(|kvdelta| format!("{} connector", name(kvdelta)))
            .into(),
        rows: vec![
            row("prefills a second", |burst| burst.prefills_per_second),
            row("waited at P, s", |burst| burst.waited_s),
        ],
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

    #[test]
    fn the_table_and_the_chart_have_every_cell() {
        let options = Command::parse_from(["capacity", "--prompts", "3,6"]).options;
        let mut cells = Vec::new();
        for memory_prompts in [6, 3] {
            for kvdelta in [true, false] {
                let burst = |add: f64| Burst {
                    prefills_per_second: add + if kvdelta { 4.0 } else { 1.0 },
                    waited_s: 2.0,
                    peak_usage: 0.5,
                    seconds: 10.0,
                };
                cells.extend(CACHED_BLOCKS.map(|cached_blocks| Cell {
                    memory_prompts,
                    cached_blocks,
                    kvdelta,
                    bursts: vec![burst(0.0), burst(0.5), burst(1.0)],
                }));
            }
        }
        let table = table(&cells, &options);
        let rows: Vec<&str> = table.lines().skip(4).collect();
        assert_eq!(rows.len(), 8, "{table}");
        assert!(
            rows[0].starts_with("| 3 | none | vLLM's | 1.50 (1.50..2.00) | 2.0"),
            "{table}"
        );
        assert!(
            rows[7].starts_with("| 6 | 7/8 | kvdelta's | 4.50"),
            "{table}"
        );
        let svg = chart(&cells).svg().unwrap();
        assert_eq!(svg.matches("<circle").count(), 2 + 2 * 8);
    }
}
