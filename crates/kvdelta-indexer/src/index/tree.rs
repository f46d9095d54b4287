//! The index: the arrays that readers walk, and behind a lock what only the writer needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use rustc_hash::{FxBuildHasher, FxHashMap};
use smallvec::SmallVec;

use super::arena::Arena;
use super::names::Names;
use super::node::{Hashes, NONE, Node, Nodes, ROOT, Words, low_bits};
use super::{Applied, Usage};
use crate::event::{Change, Event};
use crate::ids::{BlockHash, BlockSize, DpRank, EngineHash, Namespace, Tier, WorkerId, WorkerRank};

/// Which prefixes every rank holds, per tier.
///
/// Queries (`overlaps`, `overlap_of`) take no lock and never wait for a writer. While a rank's cache changes,
/// a query may say less of it than is there, never more than it held at one moment of the query. Changes
/// (`apply`, `admit`, `remove_rank`) take one lock, one at a time. See the folder's README.
pub struct Index {
    pub(super) tree: Tree,
    pub(super) writer: Mutex<Writer>,
}

impl std::fmt::Debug for Index {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = out.debug_struct("Index");
        out.field("block_size", &self.tree.block_size);
        out.field("ranks", &self.tree.ranks.len())
            .finish_non_exhaustive()
    }
}

/// The key of a child: its parent, the blocks of the parent before it, and its first block.
pub(super) type ChildKey = (u32, u32, BlockHash);

/// What readers see.
pub(super) struct Tree {
    /// Differs from that of every other index of the process.
    pub(super) id: u64,
    pub(super) block_size: BlockSize,
    pub(super) nodes: Nodes,
    pub(super) more: Words,
    /// Block hashes, in runs of one node each.
    pub(super) hashes: Hashes,
    /// The engines' hashes of the same blocks.
    pub(super) engines: Hashes,
    pub(super) children: papaya::HashMap<ChildKey, u32, FxBuildHasher>,
    pub(super) holders: Holders,
    /// Holders from here on were never used.
    pub(super) holders_end: AtomicU32,
    pub(super) ranks: papaya::HashMap<WorkerRank, RankHolders, FxBuildHasher>,
    /// Names of blocks that differ from those in `engines`.
    pub(super) other_names: papaya::HashMap<(u32, WorkerRank), EngineHash, FxBuildHasher>,
    /// The last removal that is finished; see `Holder::removal`.
    pub(super) removals_done: AtomicU64,
    /// The last removal that began, set before any holder has its number.
    pub(super) removals_begun: AtomicU64,
    /// How often a holder was given to a rank, set when it is.
    pub(super) holders_given: AtomicU64,
}

/// The holder of each tier of a rank, or `NONE`.
pub(super) type RankHolders = [u32; Tier::ALL.len()];

/// The holders of a tree.
pub(super) type Holders = Arena<Holder, { 1 << 9 }>;

/// One tier of one rank.
#[derive(Debug, Default)]
pub(super) struct Holder {
    worker: AtomicU64,
    rank: AtomicU32,
    tier: AtomicU32,
    pub(super) blocks: AtomicU64,
    /// Number of the last removal that touched it, set before any of its blocks goes.
    pub(super) removal: AtomicU64,
}

impl Holder {
    pub(super) fn set(&self, of: WorkerRank, tier: Tier) {
        self.worker.store(of.worker.0, Ordering::Relaxed);
        self.rank.store(of.rank.0, Ordering::Relaxed);
        self.tier.store(tier as u32, Ordering::Relaxed);
        self.blocks.store(0, Ordering::Relaxed);
    }

    pub(super) fn of(&self) -> (WorkerRank, Tier) {
        let rank = WorkerRank {
            worker: WorkerId(self.worker.load(Ordering::Relaxed)),
            rank: DpRank(self.rank.load(Ordering::Relaxed)),
        };
        let tier = self.tier.load(Ordering::Relaxed) as usize;
        (rank, Tier::ALL.get(tier).copied().unwrap_or(Tier::Disk))
    }
}

/// What only the writer sees.
pub(super) struct Writer {
    /// By node.
    pub(super) meta: Vec<Meta>,
    /// The node of a block, by block / 4.
    pub(super) node_of: Vec<u32>,
    pub(super) names: Names,
    /// Physical copies beyond the first, by holder and block.
    pub(super) copies: FxHashMap<(u32, u32), u32>,
    /// Nodes in which a holder has blocks, by holder; some twice, some no longer.
    pub(super) nodes_of: Vec<NodesOf>,
    pub(super) removals: u64,
    pub(super) free: Store,
    next: Next,
    retired: Store,
    /// Filled when no reader can see what is in it.
    returned: Arc<Mutex<Store>>,
}

/// What only the writer knows of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meta {
    pub(super) parent: u32,
    /// Blocks of the parent before it.
    pub(super) offset: u32,
    pub(super) children: u32,
    pub(super) namespace: Option<Namespace>,
}

/// Nodes of a holder.
#[derive(Debug, Default)]
pub(super) struct NodesOf {
    pub(super) list: Vec<u32>,
    pub(super) live: usize,
}

#[derive(Debug)]
struct Next {
    node: u32,
    more: u32,
    block: u32,
}

/// Indices that are not in use.
#[derive(Debug, Default)]
pub(super) struct Store {
    nodes: Vec<u32>,
    more: Vec<u32>,
    /// Runs of 4, 8, 16 and 32 blocks.
    runs: [Vec<u32>; 4],
    holders: Vec<u32>,
}

impl Store {
    fn append(&mut self, other: &mut Self) {
        self.nodes.append(&mut other.nodes);
        self.more.append(&mut other.more);
        self.holders.append(&mut other.holders);
        for (mine, theirs) in self.runs.iter_mut().zip(&mut other.runs) {
            mine.append(theirs);
        }
    }
}

/// The list of runs of `room` blocks.
fn class(room: u32) -> usize {
    (room.max(4).trailing_zeros() as usize - 2).min(3)
}

/// Freed nodes are handed to the readers' clock in bundles of this size.
const RETIRE: usize = 64;

static INDEXES: AtomicU64 = AtomicU64::new(0);

impl Index {
    /// An index of blocks of `block_size` tokens, without workers.
    pub fn new(block_size: BlockSize) -> Self {
        Self {
            tree: Tree {
                id: INDEXES.fetch_add(1, Ordering::Relaxed),
                block_size,
                nodes: Arena::new(),
                more: Arena::new(),
                hashes: Arena::new(),
                engines: Arena::new(),
                children: papaya::HashMap::default(),
                holders: Arena::new(),
                holders_end: AtomicU32::new(0),
                ranks: papaya::HashMap::default(),
                other_names: papaya::HashMap::default(),
                removals_done: AtomicU64::new(0),
                removals_begun: AtomicU64::new(0),
                holders_given: AtomicU64::new(0),
            },
            writer: Mutex::new(Writer {
                meta: Vec::new(),
                node_of: Vec::new(),
                names: Names::new(),
                copies: FxHashMap::default(),
                nodes_of: Vec::new(),
                removals: 0,
                free: Store::default(),
                next: Next {
                    node: 0,
                    more: 0,
                    block: 0,
                },
                retired: Store::default(),
                returned: Arc::default(),
            }),
        }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> BlockSize {
        self.tree.block_size
    }

    /// Lets events of `of` in. Without it, and after a removal, they are refused.
    pub fn admit(&self, of: WorkerRank) {
        let _writer = self.writer.lock();
        self.tree.ranks.pin().get_or_insert(of, [NONE; 3]);
    }

    /// The admitted ranks, sorted.
    pub fn ranks(&self) -> Vec<WorkerRank> {
        let mut ranks: Vec<_> = self.tree.ranks.pin().keys().copied().collect();
        ranks.sort_unstable();
        ranks
    }

    /// Applies one event. A refused event changes nothing.
    pub fn apply(&self, event: &Event) -> Applied {
        let mut writer = self.writer.lock();
        let Some(holders) = self.tree.ranks.pin().get(&event.of).copied() else {
            return Applied::refused(super::Refused::NotAdmitted);
        };
        let applied = match &event.change {
            Change::Stored(stored) => self.tree.store(&mut writer, event.of, holders, stored),
            Change::Placed {
                tier,
                engine_hashes,
            } => self
                .tree
                .place(&mut writer, event.of, holders, *tier, engine_hashes),
            Change::Removed {
                tier,
                engine_hashes,
            } => self
                .tree
                .remove(&mut writer, event.of, holders, *tier, engine_hashes),
            Change::Cleared => self.tree.clear(&mut writer, event.of, holders),
        };
        writer.retire(RETIRE);
        applied
    }

    /// Forgets a rank. When it returns no query finds it, and no event of it is let in before `admit`.
    pub fn remove_rank(&self, of: WorkerRank) -> bool {
        let mut writer = self.writer.lock();
        let Some(holders) = self.tree.ranks.pin().remove(&of).copied() else {
            return false;
        };
        self.tree.clear(&mut writer, of, holders);
        writer
            .retired
            .holders
            .extend(holders.iter().filter(|holder| **holder != NONE));
        writer.retire(1);
        true
    }

    /// Forgets all ranks of a worker, as `remove_rank`. Says how many there were.
    pub fn remove_worker(&self, worker: WorkerId) -> usize {
        let of_it = self
            .ranks()
            .into_iter()
            .filter(|rank| rank.worker == worker);
        of_it.filter(|rank| self.remove_rank(*rank)).count()
    }

    /// The namespace of a block that `of` holds: what a child of it belongs to. `None` where the block or
    /// its namespace is not known, or the name is not unique.
    pub fn namespace_of(&self, of: WorkerRank, engine: EngineHash) -> Option<Namespace> {
        let writer = self.writer.lock();
        let holders = self.tree.ranks.pin().get(&of).copied()?;
        let found = self.tree.find(&writer, of, holders, engine);
        let [block] = found.as_slice() else {
            return None;
        };
        let node = writer.node_of(*block);
        writer.meta.get(node as usize)?.namespace
    }

    /// How much a rank holds; `None`: not admitted.
    pub fn usage(&self, of: WorkerRank) -> Option<Usage> {
        let holders = self.tree.ranks.pin().get(&of).copied()?;
        let blocks = holders.map(|holder| {
            let holder = self.tree.holders.get(holder);
            holder.map_or(0, |holder| holder.blocks.load(Ordering::Relaxed))
        });
        Some(Usage { blocks })
    }
}

impl Tree {
    /// The child of `node` after its first `offset` blocks that begins with `hash`.
    #[inline]
    pub(super) fn child(&self, node: u32, offset: u32, hash: BlockHash) -> Option<u32> {
        if let Some(parent) = self.nodes.get(node) {
            let next = parent.next.load(Ordering::Acquire);
            if offset == parent.room.load(Ordering::Relaxed)
                && let Some(child) = self.nodes.get(next)
                && self.hash(child.base.load(Ordering::Relaxed)) == Some(hash)
            {
                return Some(next);
            }
            return self.branch(node, parent, offset, hash);
        }
        self.children.pin().get(&(node, offset, hash)).copied()
    }

    /// The child that `child` finds other than by `next`.
    #[inline]
    pub(super) fn branch(&self, at: u32, node: &Node, offset: u32, hash: BlockHash) -> Option<u32> {
        let branch = 1_u32.checked_shl(offset.wrapping_sub(1)).unwrap_or(0);
        if node.branches.load(Ordering::Acquire) & branch == 0 {
            return None;
        }
        self.children.pin().get(&(at, offset, hash)).copied()
    }

    pub(super) fn hash(&self, block: u32) -> Option<BlockHash> {
        let cell = self.hashes.get(block)?;
        Some(BlockHash(cell.load(Ordering::Relaxed)))
    }

    /// What the tiers of a rank hold of a node, together.
    pub(super) fn held_by_rank(&self, node: &Node, holders: RankHolders) -> u32 {
        let of_rank = holders.iter().filter(|holder| **holder != NONE);
        of_rank.fold(0, |all, holder| all | node.held_by(*holder, &self.more))
    }

    /// The blocks that `of` holds in any tier under this name: nearly always one or none.
    #[inline]
    pub(super) fn find(
        &self,
        writer: &Writer,
        of: WorkerRank,
        holders: RankHolders,
        name: EngineHash,
    ) -> SmallVec<[u32; 2]> {
        let held = |block: u32| {
            let node = self.nodes.get(writer.node_of(block));
            node.is_some_and(|node| self.held_by_rank(node, holders) & self.bit(node, block) != 0)
        };
        let mut found = SmallVec::new();
        for block in writer.names.blocks(name, &self.engines) {
            if self.other_name(block, of).is_none() && held(block) {
                found.push(block);
            }
        }
        if !writer.names.agree() {
            found.extend(writer.names.others(name, of).filter(|block| held(*block)));
        }
        found
    }

    /// What `of` calls a block, where that is not the name that the others use.
    #[inline]
    pub(super) fn other_name(&self, block: u32, of: WorkerRank) -> Option<EngineHash> {
        if self.other_names.is_empty() {
            return None;
        }
        self.other_names.pin().get(&(block, of)).copied()
    }

    pub(super) fn bit(&self, node: &Node, block: u32) -> u32 {
        let offset = block.wrapping_sub(node.base.load(Ordering::Relaxed));
        1_u32.checked_shl(offset).unwrap_or(0)
    }
}

impl Writer {
    pub(super) fn node_of(&self, block: u32) -> u32 {
        self.node_of
            .get(block as usize / 4)
            .copied()
            .unwrap_or(NONE)
    }

    /// Nodes in which a holder may have blocks, each once.
    pub(super) fn nodes_of_holder(&self, holder: u32) -> Vec<u32> {
        let nodes = self.nodes_of.get(holder as usize);
        let mut nodes = nodes.map(|nodes| nodes.list.clone()).unwrap_or_default();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Takes back what no reader can see any more.
    fn reclaim(&mut self) {
        self.free.append(&mut self.returned.lock());
    }

    /// A node with room for `room` blocks and nobody in it; `None`: no index is left.
    pub(super) fn new_node(&mut self, tree: &Tree, room: u32, meta: Meta) -> Option<u32> {
        let class = class(room);
        if self.free.nodes.is_empty() || self.free.runs.get(class)?.is_empty() {
            self.reclaim();
        }
        let base = match self.free.runs.get_mut(class)?.pop() {
            Some(base) => base,
            None => self.new_run(tree, class)?,
        };
        let node = match self.free.nodes.pop() {
            Some(node) => node,
            None => {
                let node = self.next.node;
                if node >= ROOT || !tree.nodes.reach(node) {
                    self.free.runs.get_mut(class)?.push(base);
                    return None;
                }
                self.next.node += 1;
                self.meta.push(meta);
                node
            }
        };
        *self.meta.get_mut(node as usize)? = meta;
        let groups = base as usize / 4..(base + room) as usize / 4;
        self.node_of.get_mut(groups)?.fill(node);
        let cells = tree.nodes.get(node)?;
        cells.base.store(base, Ordering::Relaxed);
        cells.room.store(room, Ordering::Relaxed);
        cells.len.store(0, Ordering::Relaxed);
        cells.next.store(NONE, Ordering::Relaxed);
        cells.branches.store(0, Ordering::Relaxed);
        Some(node)
    }

    fn new_run(&mut self, tree: &Tree, class: usize) -> Option<u32> {
        // A free larger run, or the next 32 blocks, is cut into runs of the size wanted.
        let larger =
            (class + 1..4).find_map(|larger| Some((larger, self.free.runs[larger].pop()?)));
        let (mut have, base) = match larger {
            Some(found) => found,
            None => {
                let base = self.next.block;
                let end = base.checked_add(32)?;
                if !tree.hashes.reach(end - 1) || !tree.engines.reach(end - 1) {
                    return None;
                }
                self.next.block = end;
                self.node_of.resize(end as usize / 4, NONE);
                (3, base)
            }
        };
        while have > class {
            have -= 1;
            self.free.runs[have].push(base + (4 << have));
        }
        Some(base)
    }

    /// Makes sure that a node has a free word.
    pub(super) fn make_room(&mut self, tree: &Tree, node: &Node) -> bool {
        let Some(link) = node.end_of_words(&tree.more) else {
            return true;
        };
        if self.free.more.is_empty() {
            self.reclaim();
        }
        let more = match self.free.more.pop() {
            Some(more) => more,
            None => {
                let more = self.next.more;
                if more == NONE || !tree.more.reach(more) {
                    return false;
                }
                self.next.more += 1;
                more
            }
        };
        link.store(more, Ordering::Release);
        true
    }

    /// A holder for one tier of a rank; `None`: no index is left.
    pub(super) fn new_holder(&mut self, tree: &Tree, of: WorkerRank, tier: Tier) -> Option<u32> {
        if self.free.holders.is_empty() {
            self.reclaim();
        }
        let holder = match self.free.holders.pop() {
            Some(holder) => holder,
            None => {
                let holder = tree.holders_end.load(Ordering::Relaxed);
                // Its number shares a word with the mark of a group.
                if holder >= 1 << 31 || !tree.holders.reach(holder) {
                    return None;
                }
                self.nodes_of.push(NodesOf::default());
                holder
            }
        };
        tree.holders.get(holder)?.set(of, tier);
        tree.holders_end.fetch_max(holder + 1, Ordering::Release);
        tree.holders_given.fetch_add(1, Ordering::Release);
        Some(holder)
    }

    /// Frees a node, once it is out of the tree and no reader can be in it.
    pub(super) fn free_node(&mut self, tree: &Tree, at: u32, node: &Node) {
        let room = node.room.load(Ordering::Relaxed);
        self.retired.runs[class(room)].push(node.base.load(Ordering::Relaxed));
        let more = &mut self.retired.more;
        node.take_more(&tree.more, |at| more.push(at));
        self.retired.nodes.push(at);
    }

    /// Hands what was freed to the readers' clock, when it is at least `least` nodes or holders.
    fn retire(&mut self, least: usize) {
        if self.retired.nodes.len() + self.retired.holders.len() < least {
            return;
        }
        let mut retired = std::mem::take(&mut self.retired);
        let returned = Arc::clone(&self.returned);
        let guard = crossbeam_epoch::pin();
        guard.defer(move || returned.lock().append(&mut retired));
        guard.flush();
    }
}

/// The bits of `count` blocks from `offset`.
pub(super) fn span(offset: u32, count: u32) -> u32 {
    low_bits(count).checked_shl(offset).unwrap_or(0)
}
