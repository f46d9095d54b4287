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
        let mut walk = Walk::new(groups);
        while let Some((node, same)) = tree.compare(place, prompt) {
            if !walk.step(tree, node, same) || walk.end.walked == prompt.blocks() {
                break;
            }
            match tree.after(place.node, same, walk.end.walked, prompt) {
                Some(next) => place = next,
                None => break,
            }
        }
        walk.finish();
        fence(Ordering::Acquire);
        for (holder, mut end) in walk.found {
            let Some(cells) = tree.holders.get(holder) else {
                continue;
            };
            if cells.removal.load(Ordering::Acquire) > done {
                match tree.overlap(holder, prompt) {
                    Some(now) => end = now,
                    None => continue,
                }
            }
            let (of, tier) = cells.of();
            all.push(end.overlap(tree, of, tier));
        }
    }

    /// What one rank holds of the prompt in a tier; `None`: nothing.
    pub fn overlap_of(
        &self,
        of: WorkerRank,
        tier: Tier,
        prompt: &mut Prompt<'_>,
    ) -> Option<Overlap> {
        let _pinned = crossbeam_epoch::pin();
        let holder = self.tree.ranks.pin().get(&of)?[tier as usize];
        let end = self.tree.overlap(holder, prompt)?;
        Some(end.overlap(&self.tree, of, tier))
    }
}

/// Where a walk stands: at a node that begins `position` blocks into the prompt.
#[derive(Clone, Copy)]
struct Place {
    node: u32,
    position: usize,
}

/// How far a holder came: the blocks that it holds, and which the last one is.
#[derive(Clone, Copy)]
struct End {
    walked: usize,
    last: u32,
}

impl End {
    /// `held` blocks of `node` further.
    fn further(self, node: &Node, held: u32) -> Self {
        Self {
            walked: self.walked + held as usize,
            last: node.base.load(Ordering::Relaxed) + held.saturating_sub(1),
        }
    }

    fn overlap(self, tree: &Tree, of: WorkerRank, tier: Tier) -> Overlap {
        Overlap {
            of,
            tier,
            blocks: self.walked,
            engine: tree.name(self.last, of),
        }
    }
}

const START: End = End {
    walked: 0,
    last: NONE,
};

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
        let hashes = prompt
            .hashed_to(place.position + len)
            .get(place.position..)?;
        let pairs = cells.iter().zip(hashes);
        let same = pairs.take_while(|(cell, hash)| cell.load(Ordering::Relaxed) == hash.0);
        Some((node, u32::try_from(same.count()).ok()?))
    }

    /// The node that goes on after the first `same` blocks of `node`.
    #[inline]
    fn after(
        &self,
        node: u32,
        same: u32,
        position: usize,
        prompt: &mut Prompt<'_>,
    ) -> Option<Place> {
        #[cfg(test)]
        super::tests::between_nodes();
        let hash = *prompt.hashed_to(position + 1).get(position)?;
        let node = self.child(node, same, hash)?;
        Some(Place { node, position })
    }

    /// How far one holder comes; `None`: it holds nothing, or it changes too fast to tell.
    fn overlap(&self, holder: u32, prompt: &mut Prompt<'_>) -> Option<End> {
        let cells = self.holders.get(holder)?;
        for _ in 0..WALKS {
            let done = self.removals_done.load(Ordering::Acquire);
            let end = self.walk_one(holder, prompt);
            fence(Ordering::Acquire);
            if cells.removal.load(Ordering::Acquire) <= done {
                return (end.walked > 0).then_some(end);
            }
        }
        None
    }

    fn walk_one(&self, holder: u32, prompt: &mut Prompt<'_>) -> End {
        let mut end = START;
        let mut place = self.first(prompt);
        while let Some(at) = place
            && let Some((node, same)) = self.compare(at, prompt)
        {
            let held = node.held_by(holder, &self.more).trailing_ones().min(same);
            if held == 0 {
                break;
            }
            end = end.further(node, held);
            if held < same || end.walked == prompt.blocks() {
                break;
            }
            place = self.after(at.node, same, end.walked, prompt);
        }
        end
    }

    /// What a rank calls a block.
    pub(super) fn name(&self, block: u32, of: WorkerRank) -> EngineHash {
        let common = self
            .engines
            .get(block)
            .map(|name| name.load(Ordering::Acquire));
        let other = self.other_name(block, of);
        other.unwrap_or(EngineHash(common.unwrap_or_default()))
    }
}

/// All holders on their way through one prompt.
struct Walk {
    /// By group: the holders that hold all blocks so far; before the first node, all.
    active: Vec<u32>,
    /// By group: those that hold all matching blocks of the node at hand.
    whole: Vec<u32>,
    /// Holders that fell behind, and how far they came.
    found: Vec<(u32, End)>,
    /// How far those came that did not.
    end: End,
}

impl Walk {
    fn new(groups: usize) -> Self {
        Self {
            active: vec![u32::MAX; groups],
            whole: vec![0; groups],
            found: Vec::with_capacity(groups * 32),
            end: START,
        }
    }

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
                    let held = blocks.trailing_ones();
                    if let Some(active) = self.active.get_mut(group)
                        && *active & bit != 0
                        && held > 0
                    {
                        *active &= !bit;
                        self.found.push((holder, self.end.further(node, held)));
                    }
                }
            }
        }
        let mut any = 0;
        for (group, (active, whole)) in self.active.iter_mut().zip(&self.whole).enumerate() {
            let behind = *active & !*whole;
            *active &= *whole;
            if self.end.walked > 0 && behind != 0 {
                report(&mut self.found, group, behind, self.end);
            }
            any |= *active;
        }
        if any != 0 {
            self.end = self.end.further(node, same);
        }
        any != 0
    }

    fn finish(&mut self) {
        if self.end.walked == 0 {
            return;
        }
        for (group, active) in self.active.iter().enumerate() {
            report(&mut self.found, group, *active, self.end);
        }
    }
}

/// Each holder of `group` whose bit is set came to `end`.
#[inline]
fn report(found: &mut Vec<(u32, End)>, group: usize, mut holders: u32, end: End) {
    let first = u32::try_from(group * 32).unwrap_or(NONE);
    while holders != 0 {
        found.push((first + holders.trailing_zeros(), end));
        holders &= holders - 1;
    }
}
