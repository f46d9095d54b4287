//! What the ranks hold of a prompt. Reads without a lock.
//!
//! A walk reads node after node, so a rank could lose a block behind the walk and gain one before it, and
//! the walk would add up what was never there at once. Every removal therefore leaves its number with the
//! holders that it touches before it takes anything; a walk that finds such a number afterwards is repeated.

use std::sync::atomic::{Ordering, fence};

use smallvec::{SmallVec, smallvec};

use super::Overlap;
use super::node::{NONE, Node, ROOT, Word, low_bits};
use super::tree::{Index, Tree};
use crate::hash::Prompt;
use crate::ids::{EngineHash, Tier, WorkerRank};

/// Walks for one rank that removals may disturb before the rank counts as holding nothing.
const WALKS: usize = 4;
/// Groups of 32 holders for which a walk needs no allocation.
const GROUPS: usize = 16;

impl Index {
    /// What every rank holds of the prompt, in no order. Ranks that hold nothing are left out.
    ///
    /// Hashes the prompt a little further than the longest match: 32 blocks, or an eighth of it.
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
        let tree = &self.tree;
        // Most prompts begin as no other: they need no more than this.
        let first = prompt.hashed_to(1).first();
        if first.is_none_or(|first| tree.child(ROOT, 0, *first).is_none()) {
            return;
        }
        let _pinned = crossbeam_epoch::pin();
        let done = tree.removals_done.load(Ordering::Acquire);
        let Some(mut place) = tree.first(prompt) else {
            return;
        };
        let groups = tree.holders_end.load(Ordering::Acquire).div_ceil(32) as usize;
        let mut walk = Walk::new(groups);
        while walk.step(tree, &place) {
            match tree.after(&place, walk.end.walked, prompt) {
                Some(next) => place = next,
                None => break,
            }
        }
        walk.finish();
        fence(Ordering::Acquire);
        all.reserve(walk.found.len());
        let one_name = tree.other_names.is_empty();
        let mut last = (NONE, EngineHash(0));
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
            if !one_name || last.0 != end.last {
                last = (end.last, tree.name(end.last, of));
            }
            all.push(Overlap {
                of,
                tier,
                blocks: end.walked,
                engine: last.1,
            });
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
        Some(Overlap {
            of,
            tier,
            blocks: end.walked,
            engine: self.tree.name(end.last, of),
        })
    }
}

/// Where a walk stands: at a node of which the prompt has the first `same` blocks, at least 1.
struct Place<'a> {
    at: u32,
    node: &'a Node,
    same: u32,
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
        match held.checked_sub(1) {
            None => self,
            Some(last) => Self {
                walked: self.walked + held as usize,
                last: node.base.load(Ordering::Relaxed) + last,
            },
        }
    }
}

const START: End = End {
    walked: 0,
    last: NONE,
};

impl Tree {
    fn first(&self, prompt: &mut Prompt<'_>) -> Option<Place<'_>> {
        let first = *prompt.hashed_to(1).first()?;
        self.enter(self.child(ROOT, 0, first)?, 0, prompt)
    }

    /// Node `at`, if the prompt has blocks of it from `position` on.
    #[inline(always)]
    fn enter(&self, at: u32, position: usize, prompt: &mut Prompt<'_>) -> Option<Place<'_>> {
        let node = self.nodes.get(at)?;
        let len = node.len.load(Ordering::Acquire) as usize;
        let cells = self.hashes.run(node.base.load(Ordering::Relaxed), len);
        let same = u32::try_from(prompt.common(position, cells)).ok()?;
        (same > 0).then_some(Place { at, node, same })
    }

    /// The place that goes on where the prompt leaves this one, `position` blocks into the prompt.
    #[inline(always)]
    fn after(
        &self,
        place: &Place<'_>,
        position: usize,
        prompt: &mut Prompt<'_>,
    ) -> Option<Place<'_>> {
        #[cfg(test)]
        super::tests::between_nodes();
        if position == prompt.blocks() {
            return None;
        }
        if place.same == place.node.room.load(Ordering::Relaxed)
            && let Some(next) =
                self.enter(place.node.next.load(Ordering::Acquire), position, prompt)
        {
            return Some(next);
        }
        let hash = *prompt.hashed_to(position + 1).get(position)?;
        let at = self.branch(place.at, place.node, place.same, hash)?;
        self.enter(at, position, prompt)
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
        while let Some(here) = place {
            let held = here.node.held_by(holder, &self.more).trailing_ones();
            end = end.further(here.node, held.min(here.same));
            if held < here.same {
                break;
            }
            place = self.after(&here, end.walked, prompt);
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
    active: SmallVec<[u32; GROUPS]>,
    /// Groups with such holders.
    active_groups: usize,
    /// By group: those that hold all blocks of the node at hand that the prompt has.
    whole: SmallVec<[u32; GROUPS]>,
    /// Holders that fell behind, and how far they came.
    found: SmallVec<[(u32, End); 32]>,
    /// How far those came that did not.
    end: End,
}

impl Walk {
    fn new(groups: usize) -> Self {
        Self {
            active: smallvec![u32::MAX; groups],
            active_groups: groups,
            whole: smallvec![0; groups],
            found: SmallVec::new(),
            end: START,
        }
    }

    /// Passes a node. Whether anybody holds all of its blocks that the prompt has.
    #[inline(always)]
    fn step(&mut self, tree: &Tree, place: &Place<'_>) -> bool {
        let any = self.all_hold_it(tree, place.node) || self.some_hold_it(tree, place);
        if any {
            self.end = self.end.further(place.node, place.same);
        }
        any
    }

    /// Whether all who came here hold the whole node, which is how it is for most nodes of a long prompt.
    #[inline(always)]
    fn all_hold_it(&self, tree: &Tree, node: &Node) -> bool {
        let mut left = self.active_groups;
        for cell in node.cells(&tree.more) {
            if let Word::Whole { group, holders } = Word::unpack(cell.load(Ordering::Acquire))
                && let Some(active) = self.active.get(group as usize)
                && *active != 0
            {
                if active & !holders != 0 {
                    return false;
                }
                left -= 1;
                if left == 0 {
                    return true;
                }
            }
        }
        false
    }

    #[inline(never)]
    fn some_hold_it(&mut self, tree: &Tree, place: &Place<'_>) -> bool {
        let need = low_bits(place.same);
        self.whole.fill(0);
        for cell in place.node.cells(&tree.more) {
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
                        self.found
                            .push((holder, self.end.further(place.node, held)));
                    }
                }
            }
        }
        self.active_groups = 0;
        for (group, (active, whole)) in self.active.iter_mut().zip(&self.whole).enumerate() {
            let behind = *active & !*whole;
            *active &= *whole;
            if self.end.walked > 0 && behind != 0 {
                report(&mut self.found, group, behind, self.end);
            }
            self.active_groups += usize::from(*active != 0);
        }
        self.active_groups > 0
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
fn report(found: &mut SmallVec<[(u32, End); 32]>, group: usize, mut holders: u32, end: End) {
    let first = u32::try_from(group * 32).unwrap_or(NONE);
    while holders != 0 {
        found.push((first + holders.trailing_zeros(), end));
        holders &= holders - 1;
    }
}
