// SPDX-License-Identifier: Apache-2.0

//! The tables of docs/index-benchmark.md.

use serde::Serialize;

use crate::contender::{Contender, Way};
use crate::page::{
    self, Machine, Page, Table, grouped, heads, mark, micros, millions, missing, ratio_of,
    thousands,
};
use crate::{ingest, memory, query};

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Where and how.
    pub machine: Machine,
    /// Times of queries.
    pub query: Vec<query::Row>,
    /// Speeds of loading, and readers' latencies.
    pub ingest: Vec<ingest::Row>,
    /// Bytes.
    pub memory: Vec<memory::Row>,
    /// Whether the data is large enough to be held against the goals.
    pub judged: bool,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
}

impl Report {
    /// The tables with all that stands around them.
    pub fn page(&self) -> Page<'_> {
        Page {
            command: "bench index",
            machine: &self.machine,
            tables: self.tables(),
            left_out: &self.left_out,
        }
    }

    fn at_most(&self, value: f64, goal: f64) -> String {
        page::at_most(value, goal, self.judged)
    }

    fn at_least(&self, value: f64, goal: f64) -> String {
        page::at_least(value, goal, self.judged)
    }

    fn tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        if !self.query.is_empty() {
            tables.push(self.queries(
                "Query: tokens to the overlaps of 64 workers, microseconds",
                "Each index with its own hashing. *Hashing* is that of the whole prompt alone, the \
                 peers' and ours. *Ratio* is ours by the fastest peer's in the same round.",
                true,
            ));
            tables.push(self.queries(
                "Match alone: hashes to the overlaps of 64 workers, microseconds",
                "The prompt is hashed already, whole.",
                false,
            ));
        }
        if !self.ingest.is_empty() {
            tables.push(self.speeds());
            tables.push(self.latencies());
            tables.push(self.all_speeds());
        }
        if !self.memory.is_empty() {
            tables.push(self.bytes());
        }
        tables
    }

    fn queries(&self, title: &'static str, note: &'static str, from_tokens: bool) -> Table {
        let contenders = contenders(self.query.iter().flat_map(|row| row.times.keys()));
        let mut head = vec![
            "prompts".to_owned(),
            "tokens".to_owned(),
            "match".to_owned(),
        ];
        if from_tokens {
            head.extend(["hashing: peers".to_owned(), "ours".to_owned()]);
        }
        head.extend(contenders.iter().map(Contender::to_string));
        head.extend(["ratio", "to", "goal"].map(str::to_owned));
        let rows = self.query.iter().map(|row| {
            let mut cells = vec![
                row.name.clone(),
                grouped(row.mean_tokens),
                row.depth.name().to_owned(),
            ];
            if from_tokens {
                cells.extend([micros(row.peers_hashing), micros(row.our_hashing)]);
            }
            cells.extend(contenders.iter().map(|contender| {
                row.times.get(contender).map_or_else(missing, |times| {
                    let time = if from_tokens {
                        times.query
                    } else {
                        times.matching
                    };
                    micros(time) + &mark(times.wrong)
                })
            }));
            let ratio = if from_tokens {
                &row.query_ratio
            } else {
                &row.matching_ratio
            };
            match ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some(ratio) => cells.extend([
                    ratio_of(ratio.ratio),
                    ratio.peer.to_string(),
                    ratio
                        .goal
                        .map_or_else(missing, |goal| self.at_most(ratio.ratio.median, goal)),
                ]),
            }
            cells
        });
        Table {
            title,
            note,
            rows: rows.collect(),
            head,
        }
    }

    fn speeds(&self) -> Table {
        let rows = self.ingest.iter().map(|row| {
            let ours = row
                .speeds
                .iter()
                .find(|speed| speed.contender == Contender::Kvdelta);
            let ours = ours.and_then(|speed| speed.read.as_ref());
            let mut cells = vec![
                row.name.to_owned(),
                grouped(row.events),
                grouped(row.blocks),
                ours.map_or_else(missing, |read| millions(read.blocks)),
            ];
            match &row.ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some(ratio) => cells.extend([
                    ratio_of(ratio.ratio),
                    named(ratio.peer, ratio.way),
                    self.at_least(ratio.ratio.median, ratio.goal),
                ]),
            }
            match &row.processor_ratio {
                None => cells.extend([missing(), missing()]),
                Some(ratio) => {
                    cells.extend([ratio_of(ratio.ratio), named(ratio.peer, ratio.way)]);
                }
            }
            cells
        });
        Table {
            title: "Ingest: million blocks a second, one writer and one reader",
            note: "Events are made beforehand. *Ratio* is ours by the fastest way of the fastest peer \
                   that serves readers, by time on the clock; then by the writer's processor time, which \
                   other programs on the machine disturb less, of those that are written to directly.",
            head: heads(&[
                "data",
                "events",
                "blocks",
                "kvdelta",
                "ratio",
                "to",
                "goal",
                "by processor",
                "to",
            ]),
            rows: rows.collect(),
        }
    }

    fn latencies(&self) -> Table {
        let rows = self.ingest.iter().map(|row| {
            let ours = row
                .speeds
                .iter()
                .find(|speed| speed.contender == Contender::Kvdelta);
            let ours = ours.and_then(|speed| speed.read.as_ref());
            let mut cells = vec![
                row.name.to_owned(),
                ours.map_or_else(missing, |read| micros(read.p50)),
                ours.map_or_else(missing, |read| micros(read.p99)),
            ];
            match &row.p99_ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some(ratio) => cells.extend([
                    ratio_of(ratio.ratio),
                    named(ratio.peer, ratio.way),
                    self.at_most(ratio.ratio.median, ratio.goal),
                ]),
            }
            cells
        });
        Table {
            title: "Readers' latency while a writer runs at full speed, microseconds",
            note: "Match alone, prompts of the first half of the data, in the second half of the time. \
                   *Ratio* is our 99th percentile by that of the best peer.",
            head: heads(&["data", "p50", "p99", "p99 ratio", "to", "goal"]),
            rows: rows.collect(),
        }
    }

    fn all_speeds(&self) -> Table {
        let rows = self.ingest.iter().flat_map(|row| {
            row.speeds.iter().map(|speed| {
                let mut cells = vec![
                    row.name.to_owned(),
                    named(speed.contender, speed.way) + &mark(speed.wrong),
                    millions(speed.alone),
                ];
                match &speed.read {
                    None => cells.extend(std::iter::repeat_with(missing).take(5)),
                    Some(read) => cells.extend([
                        millions(read.blocks),
                        read.of_processor.map_or_else(missing, millions),
                        thousands(read.queries),
                        micros(read.p50),
                        micros(read.p99),
                    ]),
                }
                cells
            })
        });
        Table {
            title: "Ingest and readers, each index",
            note: "Million blocks a second with nobody reading, with one reader, and by the \
                   writer's processor time; thousand queries a second of that reader, its latencies in microseconds. *Pool* goes through the peer's \
                   own `ThreadPoolIndexer` of one thread, all others write on the measured thread.",
            head: heads(&[
                "data",
                "index",
                "alone",
                "with a reader",
                "by processor",
                "queries",
                "p50",
                "p99",
            ]),
            rows: rows.collect(),
        }
    }

    fn bytes(&self) -> Table {
        let contenders = contenders(self.memory.iter().flat_map(|row| row.measured.keys()));
        let mut head = heads(&["data", "pairs", "blocks"]);
        head.extend(contenders.iter().map(Contender::to_string));
        head.extend(["ratio", "to", "goal"].map(str::to_owned));
        let rows = self.memory.iter().map(|row| {
            let any = row.measured.values().next();
            let mut cells = vec![
                row.kind.name().to_owned(),
                any.map_or_else(missing, |measured| grouped(measured.entries)),
                any.map_or_else(missing, |measured| grouped(measured.blocks)),
            ];
            cells.extend(contenders.iter().map(|contender| {
                let measured = row.measured.get(contender);
                measured.map_or_else(missing, |measured| {
                    format!("{:.1}", measured.per_entry()) + &mark(measured.wrong)
                })
            }));
            match row.ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some((peer, ratio)) => cells.extend([
                    format!("{ratio:.2}"),
                    peer.to_string(),
                    self.at_most(ratio, memory::GOAL),
                ]),
            }
            cells
        });
        Table {
            title: "Memory: bytes for a (worker, block) pair",
            note: "Bytes asked of the allocator and not given back once all events are in and freed, \
                   each index in a process of its own. *Ratio* is ours by the leanest peer that serves \
                   readers.",
            head,
            rows: rows.collect(),
        }
    }
}

fn contenders<'a>(all: impl Iterator<Item = &'a Contender>) -> Vec<Contender> {
    let mut all: Vec<_> = all.copied().collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn named(contender: Contender, way: Way) -> String {
    match way {
        Way::Direct => contender.to_string(),
        Way::Pool => format!("{contender}, pool"),
    }
}
