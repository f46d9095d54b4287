//! What the ranks hold of a prompt. Reads without a lock.
//!
//! A walk reads node after node, so a rank could lose a block behind the walk and gain one before it, and
//! the walk would add up what was never there at once. Every removal therefore leaves its number with the
//! holders that it touches before it takes anything; a walk that finds such a number afterwards is repeated.

use std::sync::atomic::{Ordering, fence};

use smallvec::SmallVec;

use super::Overlap;
use super::node::{NONE, Node, ROOT, Word, low_bits};
use super::tree::{Index, Tree};
use crate::hash::Prompt;
use crate::ids::{EngineHash, Tier, WorkerRank};

/// Walks for one rank that removals may disturb before the rank counts as holding nothing.
const WALKS: usize = 4;
/// Groups of 32 holders for which a walk needs no allocation.
const GROUPS: usize = 16;
/// Different ends of a group's holders for which it needs none.
const LEVELS: usize = 8;

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
        if !tree.begins(prompt) {
            return;
        }
        let _pinned = crossbeam_epoch::pin();
        let mut walk = Walk::new();
        tree.walk_all(prompt, &mut walk);
        all.reserve(walk.holders());
        let one_name = tree.other_names.is_empty();
        let mut last = (NONE, EngineHash(0));
        walk.for_each(tree, prompt, |holder, end| {
            let Some(cells) = tree.holders.get(holder) else {
                return;
            };
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
        });
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
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub(super) walked: usize,
    pub(super) last: u32,
}

/// Those of a group of holders that came equally far.
#[derive(Clone, Copy)]
struct Level {
    group: u32,
    holders: u32,
    end: End,
}

impl Level {
    fn of(group: u32, holders: u32, end: End) -> Self {
        Self {
            group,
            holders,
            end,
        }
    }
}

/// A group of holders on its way.
#[derive(Clone, Copy)]
struct Group {
    /// Those that hold all blocks so far; before the first node, all.
    active: u32,
    /// Those that hold all blocks of the node at hand that the prompt has.
    whole: u32,
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
    /// Whether anything begins as the prompt does. Most prompts begin as no other: they need no more than this.
    pub(super) fn begins(&self, prompt: &mut Prompt<'_>) -> bool {
        let first = prompt.hashed_to(1).first();
        first.is_some_and(|first| self.child(ROOT, 0, *first).is_some())
    }

    /// Walks all holders through the prompt.
    pub(super) fn walk_all(&self, prompt: &mut Prompt<'_>, walk: &mut Walk) {
        let done = self.removals_done.load(Ordering::Acquire);
        let Some(mut place) = self.first(prompt) else {
            return;
        };
        walk.begin(self.holders_end.load(Ordering::Acquire).div_ceil(32) as usize);
        while walk.step(self, &place) {
            match self.after(&place, walk.end.walked, prompt) {
                Some(next) => place = next,
                None => break,
            }
        }
        walk.finish();
        fence(Ordering::Acquire);
        let begun = self.removals_begun.load(Ordering::Acquire);
        walk.disturbed_since = (begun > done).then_some(done);
    }

    /// `end`, unless the holder was removed from since `done`: then how far it comes now.
    #[cold]
    fn undisturbed(
        &self,
        holder: u32,
        done: u64,
        end: End,
        prompt: &mut Prompt<'_>,
    ) -> Option<End> {
        let removal = self.holders.get(holder)?.removal.load(Ordering::Acquire);
        if removal > done {
            self.overlap(holder, prompt)
        } else {
            Some(end)
        }
    }

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
///
/// Filled where it lies: it is too large to be handed around in nanoseconds.
pub(super) struct Walk {
    groups: SmallVec<[Group; GROUPS]>,
    /// Groups with active holders.
    active_groups: usize,
    /// Holders that fell behind, and how far they came.
    found: SmallVec<[Level; LEVELS]>,
    /// How far those came that did not.
    end: End,
    /// The last removal that was finished before the walk, if there were others before its end.
    disturbed_since: Option<u64>,
}

impl Walk {
    pub(super) fn new() -> Self {
        Self {
            groups: SmallVec::new(),
            active_groups: 0,
            found: SmallVec::new(),
            end: START,
            disturbed_since: None,
        }
    }

    fn begin(&mut self, groups: usize) {
        let group = Group {
            active: u32::MAX,
            whole: 0,
        };
        self.groups.resize(groups, group);
        self.active_groups = groups;
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
                && let Some(Group { active, .. }) = self.groups.get(group as usize)
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
        let groups = self.groups.as_mut_slice();
        for group in &mut *groups {
            group.whole = 0;
        }
        let mut alike = Level::of(0, 0, START);
        let mut held_alike = 0;
        for cell in place.node.cells(&tree.more) {
            match Word::unpack(cell.load(Ordering::Acquire)) {
                Word::Free => {}
                Word::Whole { group, holders } => {
                    if let Some(group) = groups.get_mut(group as usize) {
                        group.whole |= holders;
                    }
                }
                Word::Part { holder, blocks } => {
                    let (number, bit) = (holder / 32, 1 << (holder % 32));
                    let Some(group) = groups.get_mut(number as usize) else {
                        continue;
                    };
                    if blocks & need == need {
                        group.whole |= bit;
                        continue;
                    }
                    let held = blocks.trailing_ones();
                    if group.active & bit != 0 && held > 0 {
                        group.active &= !bit;
                        // Many leave a node alike: as those do that hold a shared beginning and no more.
                        if (alike.group, held_alike) == (number, held) {
                            alike.holders |= bit;
                        } else {
                            report(&mut self.found, alike);
                            let end = self.end.further(place.node, held);
                            alike = Level::of(number, bit, end);
                            held_alike = held;
                        }
                    }
                }
            }
        }
        report(&mut self.found, alike);
        self.active_groups = 0;
        for (group, number) in groups.iter_mut().zip(0..) {
            let behind = group.active & !group.whole;
            group.active &= group.whole;
            if self.end.walked > 0 {
                report(&mut self.found, Level::of(number, behind, self.end));
            }
            self.active_groups += usize::from(group.active != 0);
        }
        self.active_groups > 0
    }

    /// Holders that it tells.
    fn holders(&self) -> usize {
        let each = self.found.iter().map(|level| level.holders.count_ones());
        each.sum::<u32>() as usize
    }

    /// Tells each holder, and how far it comes.
    #[inline]
    pub(super) fn for_each(
        &self,
        tree: &Tree,
        prompt: &mut Prompt<'_>,
        mut tell: impl FnMut(u32, End),
    ) {
        for level in &self.found {
            let Level {
                group,
                mut holders,
                end,
            } = *level;
            let first = group.saturating_mul(32);
            while holders != 0 {
                let holder = first + holders.trailing_zeros();
                holders &= holders - 1;
                let now = match self.disturbed_since {
                    None => Some(end),
                    Some(done) => tree.undisturbed(holder, done, end, prompt),
                };
                if let Some(end) = now {
                    tell(holder, end);
                }
            }
        }
    }

    fn finish(&mut self) {
        if self.end.walked == 0 {
            return;
        }
        for (group, number) in self.groups.iter().zip(0..) {
            report(&mut self.found, Level::of(number, group.active, self.end));
        }
    }
}

/// Adds a level, to the last one where that is the same.
#[inline]
fn report(found: &mut SmallVec<[Level; LEVELS]>, level: Level) {
    if level.holders == 0 {
        return;
    }
    match found.last_mut() {
        Some(last) if last.group == level.group && last.end == level.end => {
            last.holders |= level.holders;
        }
        _ => found.push(level),
    }
}
