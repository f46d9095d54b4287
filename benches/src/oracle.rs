// SPDX-License-Identifier: Apache-2.0

//! The right overlaps, from one set of prefixes.

use std::collections::{BTreeMap, HashSet};

use kvdelta_indexer::SequenceHash;

use crate::data::{Change, Sink, WORKERS, extend};

/// The overlaps of one prompt: blocks by worker, those with none left out.
pub type Overlaps = BTreeMap<usize, usize>;

/// Prompts and who holds how much of each after all events.
#[derive(Debug)]
pub struct Oracle {
    /// The right answers, in the order of the prompts.
    pub expected: Vec<Overlaps>,
}

impl Oracle {
    /// Runs `events` once, keeping only what occurs in `prompts`.
    pub fn of(prompts: &[Vec<u32>], events: impl FnOnce(&mut Sink<'_>)) -> Self {
        let chains: Vec<Vec<SequenceHash>> = prompts
            .iter()
            .map(|prompt| {
                let mut chain = Vec::new();
                extend(&mut chain, prompt);
                chain.iter().map(|block| block.sequence).collect()
            })
            .collect();
        let wanted: HashSet<SequenceHash> = chains.iter().flatten().copied().collect();
        let mut held: HashSet<(usize, SequenceHash)> = HashSet::new();
        events(&mut |step| match step.change {
            Change::Stored { blocks, .. } => {
                let known = blocks.iter().map(|block| block.sequence);
                let known = known.filter(|sequence| wanted.contains(sequence));
                held.extend(known.map(|sequence| (step.worker, sequence)));
            }
            Change::Removed(blocks) => {
                for block in blocks {
                    held.remove(&(step.worker, block.sequence));
                }
            }
        });
        let expected = chains.iter().map(|chain| {
            let depth = |worker| {
                let holds = |sequence: &&SequenceHash| held.contains(&(worker, **sequence));
                chain.iter().take_while(holds).count()
            };
            let all = (0..WORKERS).map(|worker| (worker, depth(worker)));
            all.filter(|(_, blocks)| *blocks > 0).collect()
        });
        Self {
            expected: expected.collect(),
        }
    }
}
