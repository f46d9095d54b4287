//! Blocks leave, or come into a further tier.

use std::sync::atomic::Ordering;

use super::Applied;
use super::Refused;
use super::node::{NONE, Node, ROOT};
use super::tree::{RankHolders, Tree, Writer};
use crate::ids::{EngineHash, Tier, WorkerRank};

impl Tree {
    pub(super) fn place(
        &self,
        writer: &mut Writer,
        of: WorkerRank,
        mut holders: RankHolders,
        tier: Tier,
        names: &[EngineHash],
    ) -> Applied {
        let Some(holder) = self.holder(writer, of, &mut holders, tier) else {
            return Applied::refused(Refused::Full);
        };
        let mut applied = Applied::default();
        for name in names {
            let found = self.find(writer, of, holders, *name);
            applied.unknown_blocks += u64::from(found.is_empty());
            for block in found {
                let at = writer.node_of(block);
                let Some(node) = self.nodes.get(at) else {
                    continue;
                };
                let before = node.held_by(holder, &self.more);
                let new = self.bit(node, block) & !before;
                if !writer.make_room(self, node) {
                    applied.refused = Some(Refused::Full);
                    return applied;
                }
                applied.count_stored(new != 0);
                self.hold(writer, holder, at, node, before, new);
            }
        }
        applied
    }

    pub(super) fn remove(
        &self,
        writer: &mut Writer,
        of: WorkerRank,
        holders: RankHolders,
        tier: Tier,
        names: &[EngineHash],
    ) -> Applied {
        let mut applied = Applied::default();
        let holder = holders[tier as usize];
        let removal = self.begin_removal(writer, holders);
        // Blocks of one node mostly go together, so they are taken out together.
        let (mut at, mut gone) = (NONE, 0);
        for name in names {
            let mut known = false;
            for block in self.find(writer, of, holders, *name) {
                let here = writer.node_of(block);
                let Some(node) = self.nodes.get(here) else {
                    continue;
                };
                let bit = self.bit(node, block);
                if here != at {
                    self.drop_blocks(writer, of, holders, holder, at, gone);
                    (at, gone) = (here, 0);
                }
                if holder == NONE || node.held_by(holder, &self.more) & !gone & bit == 0 {
                    continue;
                }
                known = true;
                if !writer.copies.is_empty()
                    && let Some(copies) = writer.copies.get_mut(&(holder, block))
                {
                    *copies -= 1;
                    if *copies == 0 {
                        writer.copies.remove(&(holder, block));
                    }
                    continue;
                }
                applied.removed_blocks += 1;
                gone |= bit;
            }
            applied.unknown_blocks += u64::from(!known);
        }
        self.drop_blocks(writer, of, holders, holder, at, gone);
        self.end_removal(removal);
        applied
    }

    /// Empties all tiers of a rank.
    pub(super) fn clear(
        &self,
        writer: &mut Writer,
        of: WorkerRank,
        holders: RankHolders,
    ) -> Applied {
        let mut applied = Applied::default();
        let removal = self.begin_removal(writer, holders);
        for holder in holders.into_iter().filter(|holder| *holder != NONE) {
            let Some(nodes) = writer.nodes_of.get_mut(holder as usize) else {
                continue;
            };
            for at in std::mem::take(&mut nodes.list) {
                let Some(node) = self.nodes.get(at) else {
                    continue;
                };
                let blocks = node.held_by(holder, &self.more);
                if blocks != 0 {
                    applied.removed_blocks += u64::from(blocks.count_ones());
                    self.drop_copies(writer, holder, node, blocks);
                    self.drop_blocks(writer, of, holders, holder, at, blocks);
                }
            }
        }
        self.end_removal(removal);
        applied
    }

    fn drop_copies(&self, writer: &mut Writer, holder: u32, node: &Node, blocks: u32) {
        if writer.copies.is_empty() {
            return;
        }
        for block in self.each(node, blocks) {
            writer.copies.remove(&(holder, block));
        }
    }

    /// The blocks of a node that `mask` selects.
    pub(super) fn each(&self, node: &Node, mask: u32) -> impl Iterator<Item = u32> + use<> {
        let base = node.base.load(Ordering::Relaxed);
        (0..32)
            .filter(move |bit| mask & (1 << bit) != 0)
            .map(move |bit| base + bit)
    }

    /// `holder` holds the blocks `gone` of a node no longer.
    fn drop_blocks(
        &self,
        writer: &mut Writer,
        of: WorkerRank,
        holders: RankHolders,
        holder: u32,
        at: u32,
        gone: u32,
    ) {
        let Some(node) = self.nodes.get(at) else {
            return;
        };
        if gone == 0 {
            return;
        }
        let before = node.held_by(holder, &self.more);
        // Without a word for the rest, the holder holds nothing of the node: too little is allowed.
        let left = if writer.make_room(self, node) {
            before & !gone
        } else {
            0
        };
        let gone = before & !left;
        node.set_held_by(holder, left, &self.more);
        if let Some(cells) = self.holders.get(holder) {
            cells
                .blocks
                .fetch_sub(u64::from(gone.count_ones()), Ordering::Relaxed);
        }
        if left == 0
            && let Some(nodes) = writer.nodes_of.get_mut(holder as usize)
        {
            nodes.live -= 1;
        }
        if !self.other_names.is_empty() {
            let mine = self.held_by_rank(node, holders);
            for block in self.each(node, gone & !mine) {
                if let Some(name) = self.other_names.pin().remove(&(block, of)) {
                    writer.names.remove_other(*name, block, of);
                }
            }
        }
        let held = node.held(&self.more);
        for block in self.each(node, gone & !held) {
            writer.names.remove(block, &self.engines);
        }
        if held == 0 {
            self.prune(writer, at);
        }
    }

    /// Takes a node that nobody holds out of the tree, and its ancestors that it was the last need of.
    fn prune(&self, writer: &mut Writer, mut at: u32) {
        while at < ROOT {
            let (Some(node), Some(meta)) = (self.nodes.get(at), writer.meta.get(at as usize))
            else {
                return;
            };
            if meta.children != 0 || node.held(&self.more) != 0 {
                return;
            }
            let (parent, offset) = (meta.parent, meta.offset);
            let first = self.first_hash(node);
            let above = self.nodes.get(parent);
            match above {
                Some(above) if above.next.load(Ordering::Relaxed) == at => {
                    above.next.store(NONE, Ordering::Release);
                }
                _ => {
                    self.children.pin().remove(&(parent, offset, first));
                }
            }
            if let (Some(above), Some(meta)) = (above, writer.meta.get_mut(parent as usize)) {
                meta.children -= 1;
                if meta.children == 0 {
                    above.branches.store(0, Ordering::Release);
                }
            }
            writer.free_node(self, at, node);
            at = parent;
        }
    }

    fn begin_removal(&self, writer: &mut Writer, holders: RankHolders) -> u64 {
        writer.removals += 1;
        self.removals_begun
            .store(writer.removals, Ordering::Release);
        for holder in holders {
            if let Some(holder) = self.holders.get(holder) {
                holder.removal.store(writer.removals, Ordering::Release);
            }
        }
        writer.removals
    }

    fn end_removal(&self, removal: u64) {
        self.removals_done.store(removal, Ordering::Release);
    }
}
