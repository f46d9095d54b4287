// SPDX-License-Identifier: Apache-2.0

//! Measures kvdelta's index beside those of `dynamo-kv-router` 1.6.1.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use kvdelta_benches::contender::Contender;
use kvdelta_benches::data::Data;
use kvdelta_benches::memory::Kind;
use kvdelta_benches::page::Machine;
use kvdelta_benches::progress::Progress;
use kvdelta_benches::report::Report;
use kvdelta_benches::trace::Trace;
use kvdelta_benches::{ingest, memory, query};

/// kvdelta's index beside those of dynamo-kv-router 1.6.1: queries, loading, memory, readers' latency.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench index",
    after_help = "Examples:
  cargo xtask bench index --trace mooncake_conversation.jsonl.gz
  cargo xtask bench index --quick
  cargo xtask bench index --only memory --contenders kvdelta,compressed

The trace is that of Mooncake's FAST'25 release (github.com/kvcache-ai/Mooncake, folder
FAST25-release/traces, conversation), as it is or compressed by gzip.

An answer of kvdelta's that differs from the oracle's fails the run; one of a peer's is told."
)]
struct Options {
    /// Small data and few rounds: under a minute, for its answers rather than its times.
    #[arg(long)]
    quick: bool,
    /// The conversation trace; without it there are no rows about it.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write all figures to a file, `-` for standard output in place of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the tables into docs/index-benchmark.md too.
    #[arg(long)]
    markdown: bool,
    /// Measure only these.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<Part>,
    /// Measure only these indexes.
    #[arg(long, value_name = "INDEX", value_delimiter = ',')]
    contenders: Vec<Contender>,
    /// Rounds of queries and, a third of them, of loading.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
}

/// A part of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// From tokens and from hashes to overlaps.
    Query,
    /// Loading, and readers meanwhile.
    Ingest,
    /// Bytes for a pair.
    Memory,
}

/// How much is measured.
struct Sizes {
    rounds: usize,
    turn: Duration,
    background: usize,
    prompts: [(usize, usize); 2],
    ingest: usize,
    requests: usize,
    capacity: usize,
    memory: usize,
}

const FULL: Sizes = Sizes {
    rounds: 27,
    turn: Duration::from_millis(4),
    background: 1_000_000,
    prompts: [(512, 32), (8_192, 8)],
    ingest: 1_000_000,
    requests: 600,
    capacity: 128,
    memory: 10_000_000,
};

const QUICK: Sizes = Sizes {
    rounds: 3,
    turn: Duration::from_micros(200),
    background: 50_000,
    prompts: [(512, 8), (8_192, 2)],
    ingest: 100_000,
    requests: 200,
    capacity: 64,
    memory: 200_000,
};

fn main() -> Result<()> {
    let options = Options::parse();
    let sizes = if options.quick { QUICK } else { FULL };
    let rounds = options.rounds.unwrap_or(sizes.rounds).max(1);
    let contenders = if options.contenders.is_empty() {
        Contender::ALL.to_vec()
    } else {
        options.contenders.clone()
    };
    let trace = options.trace.as_deref().map(Trace::read).transpose()?;
    let does = |part| options.only.is_empty() || options.only.contains(&part);
    let mut progress = Progress::default();
    let mut report = Report {
        machine: Machine::here("bench index"),
        query: Vec::new(),
        ingest: Vec::new(),
        memory: Vec::new(),
        // Fixed costs and short runs would decide.
        judged: !options.quick,
        left_out: left_out(&options),
    };
    let caches = trace.as_ref().map(|trace| Data::Trace {
        trace: trace.first(sizes.requests),
        passes: 1,
        capacity: sizes.capacity,
    });
    let decode = Data::Decode {
        entries: sizes.ingest / 4,
        sequences: 8,
    };
    if does(Part::Query) {
        let mut prompts = vec![Data::Tree {
            entries: sizes.background,
        }];
        prompts.extend(
            sizes
                .prompts
                .map(|(blocks, prompts)| Data::Prompts { blocks, prompts }),
        );
        let mut loads = vec![prompts, vec![decode.clone()]];
        loads.extend(caches.clone().map(|caches| vec![caches]));
        let plan = query::Plan {
            contenders: contenders.clone(),
            rounds,
            turn: sizes.turn,
            loads,
        };
        report.query = query::run(&plan, &mut progress)?;
    }
    if does(Part::Ingest) {
        let mut data = vec![Data::Tree {
            entries: sizes.ingest,
        }];
        data.extend(caches);
        data.push(decode);
        let plan = ingest::Plan {
            contenders: contenders.clone(),
            rounds: rounds.div_ceil(3),
            data,
        };
        report.ingest = ingest::run(&plan, &mut progress)?;
    }
    if does(Part::Memory) {
        let mut kinds = vec![Kind::Everywhere, Kind::Tree, Kind::Decode];
        if trace.is_some() {
            kinds.insert(2, Kind::Trace);
        }
        let plan = memory::Plan {
            contenders,
            kinds,
            entries: sizes.memory,
            trace: options.trace.clone(),
        };
        report.memory = memory::run(&plan, &mut progress)?;
    }
    report.page().show(
        &report,
        options.json.as_deref(),
        options.markdown,
        "index-benchmark.md",
    )
}

fn left_out(options: &Options) -> Vec<String> {
    let mut all = Vec::new();
    if options.trace.is_none() {
        all.push("the conversation trace: no `--trace FILE`".to_owned());
    }
    all.extend(
        [
            "`GlobalCkfIndexer` (cuckoo): answers for at most 16 data centres, not for workers, and by \
             a filter that can say too much",
            "`LowerTierIndexer`: continues a match of another index in host memory and on disk",
            "`KvIndexer`, `LocalKvIndexer`: the radix tree behind a queue, one thread for events and \
             queries alike",
        ]
        .map(str::to_owned),
    );
    all
}
