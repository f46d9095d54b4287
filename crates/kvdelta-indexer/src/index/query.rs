//! What the ranks hold of a prompt. Reads without a lock.
//!
//! A walk reads node after node, so a rank could lose a block behind the walk and gain one before it, and
//! the walk would add up what was never there at once. Every removal therefore leaves its number with the
//! holders that it touches before it takes anything; a walk that finds such a number afterwards is repeated.

use std::sync::atomic::{Ordering, fence};

use super::Overlap;
use super::node::{NONE, Node, ROOT, Word, low_bits};
use super::tree::{Index, Tree};
use crate::hash::Prompt;
use crate::ids::{EngineHash, Tier, WorkerRank};

/// Walks for one rank that removals may disturb before the rank counts as holding nothing.
const WALKS: usize = 4;

impl Index {
    /// What every rank holds of the prompt, in no order. Ranks that hold nothing are left out.
    ///
    /// Hashes the prompt no further than 32 blocks past the longest match.
    pub fn overlaps(&self, prompt: &mut Prompt<'_>) -> Vec<Overlap> {
        let mut all = Vec::new();
        self.overlaps_into(prompt, &mut all);
        all
    }

    /// As `overlaps`, for several prompts.
    pub fn overlaps_of_all(&self, prompts: &mut [Prompt<'_>]) -> Vec<Vec<Overlap>> {
        let _pinned = crossbeam_epoch::pin();
        let each = prompts.iter_mut();
        each.map(|prompt| self.overlaps(prompt)).collect()
    }

    /// As `overlaps`, into `all`, which is emptied first.
    pub fn overlaps_into(&self, prompt: &mut Prompt<'_>, all: &mut Vec<Overlap>) {
        all.clear();
        let _pinned = crossbeam_epoch::pin();
        let tree = &self.tree;
        let done = tree.removals_done.load(Ordering::Acquire);
        let Some(mut place) = tree.first(prompt) else {
            return;
        };
        let groups = tree.holders_end.load(Ordering::Acquire).div_ceil(32) as usize;
        let mut walk = Walk {
            active: vec![u32::MAX; groups],
            whole: vec![0; groups],
            found: Vec::with_capacity(groups * 32),
            walked: 0,
        };
        while let Some((node, same)) = tree.compare(place, prompt) {
            if !walk.step(tree, node, same) || walk.walked == prompt.blocks() {
                break;
            }
            match tree.after(place.node, same, walk.walked, prompt) {
                Some(node) => {
                    place = Place {
                        node,
                        position: walk.walked,
                    };
                }
                None => break,
            }
        }
        if walk.walked > 0 {
            walk.finish();
        }
        fence(Ordering::Acquire);
        for (holder, blocks) in walk.found {
            let Some(cells) = tree.holders.get(holder) else {
                continue;
            };
            let (of, tier) = cells.of();
            let mut blocks = blocks;
            if cells.removal.load(Ordering::Acquire) > done {
                blocks = tree.overlap(holder, prompt).0;
            }
            if blocks > 0 {
                all.push(Overlap { of, tier, blocks });
            }
        }
    }

    /// What one rank holds of the prompt in a tier: blocks from position 0 without a hole, and the rank's own
    /// engine hash of the last of them, which a claim carries.
    pub fn overlap_of(
        &self,
        of: WorkerRank,
        tier: Tier,
        prompt: &mut Prompt<'_>,
    ) -> (usize, Option<EngineHash>) {
        let _pinned = crossbeam_epoch::pin();
        let holders = self.tree.ranks.pin().get(&of).copied();
        let holder = holders.map_or(NONE, |holders| holders[tier as usize]);
        if holder == NONE {
            return (0, None);
        }
        let (blocks, last) = self.tree.overlap(holder, prompt);
        let name = last.and_then(|block| {
            let common = self.tree.engines.get(block)?.load(Ordering::Acquire);
            Some(
                self.tree
                    .other_name(block, of)
                    .unwrap_or(EngineHash(common)),
            )
        });
        (blocks, name)
    }
}

/// Where a walk stands: at a node that begins `position` blocks into the prompt.
#[derive(Clone, Copy)]
struct Place {
    node: u32,
    position: usize,
}

impl Tree {
    fn first(&self, prompt: &mut Prompt<'_>) -> Option<Place> {
        let first = *prompt.hashed_to(1).first()?;
        Some(Place {
            node: self.child(ROOT, 0, first)?,
            position: 0,
        })
    }

    /// The node, and how many of its blocks the prompt has in its place.
    #[inline]
    fn compare(&self, place: Place, prompt: &mut Prompt<'_>) -> Option<(&Node, u32)> {
        let node = self.nodes.get(place.node)?;
        let len = node.len.load(Ordering::Acquire) as usize;
        let cells = self.hashes.run(node.base.load(Ordering::Relaxed), len);
        let hashes = prompt.hashed_to(place.position + len);
        let pairs = cells.iter().zip(hashes.get(place.position..)?);
        let same = pairs.take_while(|(cell, hash)| cell.load(Ordering::Relaxed) == hash.0);
        Some((node, u32::try_from(same.count()).ok()?))
    }

    /// The node that goes on after the first `same` blocks of `node`.
    #[inline]
    fn after(&self, node: u32, same: u32, position: usize, prompt: &mut Prompt<'_>) -> Option<u32> {
        let hash = *prompt.hashed_to(position + 1).get(position)?;
        self.child(node, same, hash)
    }

    /// Blocks that one holder has, and the last of them.
    fn overlap(&self, holder: u32, prompt: &mut Prompt<'_>) -> (usize, Option<u32>) {
        let Some(cells) = self.holders.get(holder) else {
            return (0, None);
        };
        for _ in 0..WALKS {
            let done = self.removals_done.load(Ordering::Acquire);
            let found = self.walk_one(holder, prompt);
            fence(Ordering::Acquire);
            if cells.removal.load(Ordering::Acquire) <= done {
                return found;
            }
        }
        (0, None)
    }

    fn walk_one(&self, holder: u32, prompt: &mut Prompt<'_>) -> (usize, Option<u32>) {
        let (mut walked, mut last) = (0, None);
        let mut place = self.first(prompt);
        while let Some(at) = place {
            let Some((node, same)) = self.compare(at, prompt) else {
                break;
            };
            let held = node.held_by(holder, &self.more).trailing_ones().min(same);
            if held > 0 {
                walked += held as usize;
                last = Some(node.base.load(Ordering::Relaxed) + held - 1);
            }
            if held < same || held == 0 || walked == prompt.blocks() {
                break;
            }
            let next = self.after(at.node, same, walked, prompt);
            place = next.map(|node| Place {
                node,
                position: walked,
            });
        }
        (walked, last)
    }
}

/// All holders on their way through one prompt.
struct Walk {
    /// By group: the holders that hold all blocks so far; at first nobody is excluded.
    active: Vec<u32>,
    /// By group: those that hold all matching blocks of the node at hand.
    whole: Vec<u32>,
    /// Holders that fell behind, and the blocks that they hold.
    found: Vec<(u32, usize)>,
    walked: usize,
}

impl Walk {
    /// Passes a node of which the prompt has `same` blocks. Whether anybody holds all of these.
    #[inline]
    fn step(&mut self, tree: &Tree, node: &Node, same: u32) -> bool {
        let need = low_bits(same);
        self.whole.fill(0);
        for cell in node.cells(&tree.more) {
            match Word::unpack(cell.load(Ordering::Acquire)) {
                Word::Free => {}
                Word::Whole { group, holders } => {
                    if let Some(whole) = self.whole.get_mut(group as usize) {
                        *whole |= holders;
                    }
                }
                Word::Part { holder, blocks } => {
                    let (group, bit) = (holder as usize / 32, 1 << (holder % 32));
                    let Some(whole) = self.whole.get_mut(group) else {
                        continue;
                    };
                    if blocks & need == need {
                        *whole |= bit;
                        continue;
                    }
                    let held = self.walked + blocks.trailing_ones() as usize;
                    if let Some(active) = self.active.get_mut(group)
                        && *active & bit != 0
                        && held > 0
                    {
                        *active &= !bit;
                        self.found.push((holder, held));
                    }
                }
            }
        }
        let mut any = 0;
        for (group, (active, whole)) in self.active.iter_mut().zip(&self.whole).enumerate() {
            let behind = *active & !*whole;
            *active &= *whole;
            if self.walked > 0 && behind != 0 {
                report(&mut self.found, group, behind, self.walked);
            }
            any |= *active;
        }
        if any != 0 {
            self.walked += same as usize;
        }
        any != 0
    }

    fn finish(&mut self) {
        for (group, active) in self.active.iter().enumerate() {
            report(&mut self.found, group, *active, self.walked);
        }
    }
}

/// Each holder of `group` whose bit is set has `blocks`.
fn report(found: &mut Vec<(u32, usize)>, group: usize, mut holders: u32, blocks: usize) {
    let first = u32::try_from(group * 32).unwrap_or(NONE);
    while holders != 0 {
        found.push((first + holders.trailing_zeros(), blocks));
        holders &= holders - 1;
    }
}
