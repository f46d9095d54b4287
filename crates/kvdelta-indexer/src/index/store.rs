//! Blocks come in.

use std::sync::atomic::Ordering;

use super::node::{NODE_BLOCKS, NONE, Node, ROOT};
use super::tree::{Meta, RankHolders, Tree, Writer, span};
use super::{Applied, Refused};
use crate::event::{Copies, Stored, StoredBlock};
use crate::ids::{EngineHash, Tier, WorkerRank};

/// One store on its way down the tree.
struct Descent<'a> {
    of: WorkerRank,
    holders: RankHolders,
    holder: u32,
    stored: &'a Stored,
    applied: Applied,
}

impl Tree {
    pub(super) fn store(
        &self,
        writer: &mut Writer,
        of: WorkerRank,
        mut holders: RankHolders,
        stored: &Stored,
    ) -> Applied {
        if let Some(refused) = Refused::of(stored) {
            return Applied::refused(refused);
        }
        let mut from = (ROOT, 0);
        let mut namespace = stored.namespace;
        if let Some(parent) = stored.parent {
            from = match self.find(writer, of, holders, parent).as_slice() {
                [] => return Applied::refused(Refused::UnknownParent),
                [_, _, ..] => return Applied::refused(Refused::AmbiguousParent),
                &[block] => {
                    let at = writer.node_of(block);
                    let base = self
                        .nodes
                        .get(at)
                        .map_or(0, |n| n.base.load(Ordering::Relaxed));
                    let meta = writer.meta.get(at as usize);
                    namespace = namespace.or(meta.and_then(|meta| meta.namespace));
                    (at, block.wrapping_sub(base) + 1)
                }
            };
        }
        let Some(holder) = self.holder(writer, of, &mut holders, stored.tier) else {
            return Applied::refused(Refused::Full);
        };
        let mut descent = Descent {
            of,
            holders,
            holder,
            stored,
            applied: Applied::default(),
        };
        let (mut at, mut offset) = from;
        let mut rest = stored.blocks.as_slice();
        while let Some(first) = rest.first() {
            let node = self.nodes.get(at);
            let there = node.map_or(0, |node| self.matching(node, offset, rest));
            if let (Some(node), 1..) = (node, there) {
                let (known, more) = rest.split_at(there as usize);
                if !descent.join(self, writer, at, node, offset, known) {
                    break;
                }
                if let Some(meta) = writer.meta.get_mut(at as usize) {
                    meta.namespace = meta.namespace.or(namespace);
                }
                (rest, offset) = (more, offset + there);
                continue;
            }
            if let Some(child) = self.child(at, offset, first.block) {
                (at, offset) = (child, 0);
                continue;
            }
            let mut room = 0;
            if let Some(node) = node {
                room = node.room.load(Ordering::Relaxed);
                if offset == node.len.load(Ordering::Relaxed) && offset < room {
                    let fits = rest.len().min((room - offset) as usize);
                    let (new, more) = rest.split_at(fits);
                    if !descent.append(self, writer, at, node, offset, new) {
                        break;
                    }
                    (rest, offset) = (more, offset + blocks(fits));
                    continue;
                }
            }
            // A chain that grows block by block gets larger and larger nodes.
            let continues = node.is_some() && offset == room;
            let wanted = rest
                .len()
                .max(if continues { 2 * room as usize } else { 0 });
            let wanted = blocks(wanted.clamp(4, NODE_BLOCKS)).next_power_of_two();
            let meta = Meta {
                parent: at,
                offset,
                children: 0,
                namespace,
            };
            let Some(child) = writer.new_node(self, wanted, meta) else {
                descent.applied.refused = Some(Refused::Full);
                break;
            };
            let Some(cells) = self.nodes.get(child) else {
                break;
            };
            let (new, more) = rest.split_at(rest.len().min(wanted as usize));
            descent.append(self, writer, child, cells, 0, new);
            self.link(writer, (at, offset, first), child, continues);
            (rest, at, offset) = (more, child, blocks(new.len()));
        }
        descent.applied
    }

    /// The holder of a tier, made where there is none.
    pub(super) fn holder(
        &self,
        writer: &mut Writer,
        of: WorkerRank,
        holders: &mut RankHolders,
        tier: Tier,
    ) -> Option<u32> {
        let holder = holders.get_mut(tier as usize)?;
        if *holder == NONE {
            *holder = writer.new_holder(self, of, tier)?;
            self.ranks.pin().insert(of, *holders);
        }
        Some(holders[tier as usize])
    }

    /// How many of `blocks` the node has from `offset` on.
    fn matching(&self, node: &Node, offset: u32, blocks: &[StoredBlock]) -> u32 {
        let len = node.len.load(Ordering::Relaxed);
        let start = node.base.load(Ordering::Relaxed) + offset;
        let there = self.hashes.run(start, len.saturating_sub(offset) as usize);
        let pairs = there.iter().zip(blocks);
        let same = pairs.take_while(|(cell, block)| cell.load(Ordering::Relaxed) == block.block.0);
        self::blocks(same.count())
    }

    fn link(
        &self,
        writer: &mut Writer,
        (parent, offset, first): (u32, u32, &StoredBlock),
        child: u32,
        continues: bool,
    ) {
        if let Some(meta) = writer.meta.get_mut(parent as usize) {
            meta.children += 1;
        }
        let node = self.nodes.get(parent);
        match node {
            Some(node) if continues && node.next.load(Ordering::Relaxed) == NONE => {
                node.next.store(child, Ordering::Release);
            }
            _ => {
                self.children
                    .pin()
                    .insert((parent, offset, first.block), child);
                if let Some(node) = node {
                    node.branches.fetch_or(1 << (offset - 1), Ordering::Release);
                }
            }
        }
    }
}

impl Descent<'_> {
    /// The holder comes to hold blocks that the node has.
    fn join(
        &mut self,
        tree: &Tree,
        writer: &mut Writer,
        at: u32,
        node: &Node,
        offset: u32,
        known: &[StoredBlock],
    ) -> bool {
        if !self.make_room(tree, writer, node) {
            return false;
        }
        let base = node.base.load(Ordering::Relaxed);
        let mine = tree.held_by_rank(node, self.holders);
        let before = node.held_by(self.holder, &tree.more);
        let mut held = None;
        for (block, stored) in (base + offset..).zip(known) {
            let bit = tree.bit(node, block);
            let Some(name) = tree.engines.get(block) else {
                continue;
            };
            let common = EngineHash(name.load(Ordering::Relaxed));
            let mut renamed = false;
            if mine & bit != 0 {
                let other = tree.other_name(block, self.of);
                renamed = other.unwrap_or(common) != stored.engine;
                if renamed {
                    if let Some(other) = other {
                        self.forget_name(tree, writer, block, other);
                    }
                    if common != stored.engine {
                        self.learn_name(tree, writer, block, stored.engine);
                    }
                }
            } else if *held.get_or_insert_with(|| node.held(&tree.more)) & bit == 0 {
                // Nobody's, so out of the table: it may take a new name.
                name.store(stored.engine.0, Ordering::Relaxed);
                writer.names.insert(block, &tree.engines);
            } else if common != stored.engine {
                self.learn_name(tree, writer, block, stored.engine);
            }
            if before & bit != 0 {
                let copies = (self.holder, block);
                if self.stored.copies == Copies::Counted && !renamed {
                    *writer.copies.entry(copies).or_default() += 1;
                } else {
                    writer.copies.remove(&copies);
                }
            }
        }
        self.hold(
            tree,
            writer,
            at,
            node,
            before,
            span(offset, blocks(known.len())),
        );
        true
    }

    /// New blocks, at the node's end.
    fn append(
        &mut self,
        tree: &Tree,
        writer: &mut Writer,
        at: u32,
        node: &Node,
        offset: u32,
        new: &[StoredBlock],
    ) -> bool {
        if !self.make_room(tree, writer, node) {
            return false;
        }
        let base = node.base.load(Ordering::Relaxed) + offset;
        let count = blocks(new.len());
        let hashes = tree.hashes.run(base, new.len());
        let names = tree.engines.run(base, new.len());
        for ((hash, name), block) in hashes.iter().zip(names).zip(new) {
            hash.store(block.block.0, Ordering::Relaxed);
            name.store(block.engine.0, Ordering::Relaxed);
        }
        for block in base..base + count {
            writer.names.insert(block, &tree.engines);
        }
        node.len.store(offset + count, Ordering::Release);
        let before = node.held_by(self.holder, &tree.more);
        self.hold(tree, writer, at, node, before, span(offset, count));
        true
    }

    fn hold(
        &mut self,
        tree: &Tree,
        writer: &mut Writer,
        at: u32,
        node: &Node,
        before: u32,
        wanted: u32,
    ) {
        let new = wanted & !before;
        self.applied.stored_blocks += u64::from(new.count_ones());
        self.applied.repeated_blocks += u64::from((wanted & before).count_ones());
        tree.hold(writer, self.holder, at, node, before, new);
    }

    fn make_room(&mut self, tree: &Tree, writer: &mut Writer, node: &Node) -> bool {
        let room = writer.make_room(tree, node);
        if !room {
            self.applied.refused = Some(Refused::Full);
        }
        room
    }

    fn learn_name(&self, tree: &Tree, writer: &mut Writer, block: u32, name: EngineHash) {
        tree.other_names.pin().insert((block, self.of), name);
        writer.names.insert_other(name, block, self.of);
    }

    fn forget_name(&self, tree: &Tree, writer: &mut Writer, block: u32, name: EngineHash) {
        tree.other_names.pin().remove(&(block, self.of));
        writer.names.remove_other(name, block, self.of);
    }
}

impl Tree {
    /// `holder`, which held the blocks `before` of a node, comes to hold `new` too. After `make_room`.
    pub(super) fn hold(
        &self,
        writer: &mut Writer,
        holder: u32,
        at: u32,
        node: &Node,
        before: u32,
        new: u32,
    ) {
        if new == 0 {
            return;
        }
        node.set_held_by(holder, before | new, &self.more);
        if let Some(cells) = self.holders.get(holder) {
            cells
                .blocks
                .fetch_add(u64::from(new.count_ones()), Ordering::Relaxed);
        }
        if before == 0 {
            self.note_node(writer, holder, at);
        }
    }

    fn note_node(&self, writer: &mut Writer, holder: u32, at: u32) {
        let Some(nodes) = writer.nodes_of.get_mut(holder as usize) else {
            return;
        };
        nodes.live += 1;
        nodes.list.push(at);
        if nodes.list.len() > 64 + 2 * nodes.live {
            nodes.list.sort_unstable();
            nodes.list.dedup();
            let held = |at: &u32| {
                self.nodes
                    .get(*at)
                    .map(|node| node.held_by(holder, &self.more))
            };
            nodes
                .list
                .retain(|at| held(at).is_some_and(|held| held != 0));
        }
    }
}

/// A count of blocks within one node.
fn blocks(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
