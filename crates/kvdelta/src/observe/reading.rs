// SPDX-License-Identifier: Apache-2.0

//! What index and trust say at one time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvdelta_indexer::feed::Control;
use kvdelta_indexer::{
    Index, Millis, Namespace, Overlap, Prompt, PromptOf, RankCounts, Sharing, Standing, Tier,
    Usage, WorkerId, WorkerRank,
};

/// Share of the time that may go into counting what is held twice.
const COUNTING_SHARE: u32 = 20;

/// The indexer's label for events of blocks of another size than the index has.
pub(crate) const BLOCK_SIZE_MISMATCH: &str = "block_size_mismatch";

/// Everything that a snapshot is made of, at one time.
#[derive(Debug, Clone)]
pub(crate) struct Reading {
    pub(crate) at: Millis,
    /// By name, then by rank.
    pub(crate) ranks: Vec<Rank>,
    pub(crate) device: Counted,
    /// What the workers hold of each prompt.
    pub(crate) overlaps: Vec<Vec<Overlap>>,
    /// Messages that were lost between socket and index.
    pub(crate) lost: u64,
    /// Events that were not of use, by reason.
    pub(crate) skipped: BTreeMap<&'static str, u64>,
}

impl Reading {
    /// Whether blocks have another size than was said, and a rank that told of some is shown to hold none.
    /// Skips are not counted by rank: where they are mixed with ranks that are empty, this may be wrong.
    pub(crate) fn has_wrong_block_size(&self) -> bool {
        let is_empty =
            |rank: &Rank| rank.standing.last_seq.is_some() && rank.usage.blocks == [0, 0, 0];
        let skips = self.skipped.get(BLOCK_SIZE_MISMATCH);
        skips.is_some_and(|skips| *skips > 0) && self.ranks.iter().any(is_empty)
    }
}

/// One rank of a reading.
#[derive(Debug, Clone)]
pub(crate) struct Rank {
    pub(crate) worker: String,
    pub(crate) of: WorkerRank,
    pub(crate) usage: Usage,
    pub(crate) counts: RankCounts,
    pub(crate) standing: Standing,
}

/// What is held twice in device memory, and when it was counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) sharing: Sharing,
    pub(crate) at: Millis,
}

/// Names of the workers, where their ids are not their names.
pub(crate) type Names = BTreeMap<WorkerId, String>;

/// Takes readings.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    index: &'a Index,
    control: &'a Control,
    prompts: Vec<Prompt<'a>>,
    counted: Option<(Counted, Duration)>,
}

impl<'a> Reader<'a> {
    /// Of what `control` keeps up to date in `index`.
    pub(crate) fn new(
        index: &'a Index,
        control: &'a Control,
        prompts: &'a [Vec<u32>],
        namespace: Namespace,
    ) -> Self {
        let of = PromptOf {
            namespace,
            ..PromptOf::default()
        };
        let prompts = prompts.iter();
        Self {
            index,
            control,
            prompts: prompts
                .map(|tokens| Prompt::new(tokens, index.block_size(), of))
                .collect(),
            counted: None,
        }
    }

    /// Reads everything off.
    pub(crate) fn read(&mut self, names: &Names) -> Reading {
        let now = self.control.now();
        let counters = self.control.counters();
        let standings = self.control.trust().standings(now).into_iter();
        let mut ranks: Vec<Rank> = standings
            .map(|(of, standing)| Rank {
                worker: names
                    .get(&of.worker)
                    .cloned()
                    .unwrap_or_else(|| format!("{:x}", of.worker.0)),
                of,
                usage: self.index.usage(of).unwrap_or_default(),
                counts: counters.of_rank(of),
                standing,
            })
            .collect();
        ranks.sort_by(|a, b| (&a.worker, a.of).cmp(&(&b.worker, b.of)));
        let queue = self.control.queue();
        Reading {
            at: now,
            ranks,
            device: self.count(now),
            overlaps: self.index.overlaps_of_all(&mut self.prompts),
            lost: queue.dropped().saturating_add(queue.malformed()),
            skipped: counters.skips(),
        }
    }

    /// Counts anew, unless the last count took so long that this would take much of the time.
    fn count(&mut self, now: Millis) -> Counted {
        if let Some((counted, took)) = self.counted
            && now.since(counted.at) < took * COUNTING_SHARE
        {
            return counted;
        }
        let began = Instant::now();
        let counted = Counted {
            sharing: self.index.sharing(Tier::Device),
            at: now,
        };
        self.counted = Some((counted, began.elapsed()));
        counted
    }
}
