//! Nodes: up to 32 consecutive blocks of one chain, and who holds which of them.
//!
//! What a node says about its blocks (their hashes) is written before it can be found, or before its length
//! covers them, and never changes after that. Who holds them changes by single atomic words.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::arena::Arena;

/// The nodes of a tree.
pub(super) type Nodes = Arena<Node, { 1 << 13 }>;
/// The words of nodes that have more of them than fit in.
pub(super) type Words = Arena<MoreWords, { 1 << 13 }>;
/// Hashes of blocks, in runs of one node each.
pub(super) type Hashes = Arena<AtomicU64, { 1 << 17 }>;

/// Blocks that one node can have: as many as the bits of a mask.
pub(super) const NODE_BLOCKS: usize = 32;
/// No node, no entries.
pub(super) const NONE: u32 = u32::MAX;
/// The parent of the first node of a chain.
pub(super) const ROOT: u32 = u32::MAX - 1;

const INLINE: usize = 4;
const MORE: usize = 7;
/// Marks the word of a group of holders that hold the whole node.
const WHOLE: u32 = 1 << 31;

/// A node, one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Node {
    /// First cell in the arenas of hashes.
    pub(super) base: AtomicU32,
    /// Blocks that have their hashes.
    pub(super) len: AtomicU32,
    /// Blocks for which there is room: 4, 8, 16 or 32.
    pub(super) room: AtomicU32,
    /// The first child that continues after the last block that there is room for.
    pub(super) next: AtomicU32,
    /// Bit n: the map of children may have some that follow the first n + 1 blocks.
    pub(super) branches: AtomicU32,
    more: AtomicU32,
    words: [AtomicU64; INLINE],
}

impl Default for Node {
    fn default() -> Self {
        Self {
            base: AtomicU32::new(NONE),
            len: AtomicU32::new(0),
            room: AtomicU32::new(0),
            next: AtomicU32::new(NONE),
            branches: AtomicU32::new(0),
            more: AtomicU32::new(NONE),
            words: Default::default(),
        }
    }
}

/// More words of a node.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct MoreWords {
    words: [AtomicU64; MORE],
    next: AtomicU32,
}

impl Default for MoreWords {
    fn default() -> Self {
        Self {
            words: Default::default(),
            next: AtomicU32::new(NONE),
        }
    }
}

/// A word of a node: some holders and what they hold of it. Written and read whole, so that holders and
/// blocks never come from different moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// Nobody.
    Free,
    /// Each holder `32 * group + bit` of `holders` holds every block that there is room for.
    Whole { group: u32, holders: u32 },
    /// One holder holds the blocks of `blocks`.
    Part { holder: u32, blocks: u32 },
}

impl Word {
    #[inline]
    pub(super) fn unpack(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        let mask = u32::from_le_bytes([a, b, c, d]);
        let key = u32::from_le_bytes([e, f, g, h]);
        if mask == 0 {
            Self::Free
        } else if key & WHOLE != 0 {
            Self::Whole {
                group: key & !WHOLE,
                holders: mask,
            }
        } else {
            Self::Part {
                holder: key,
                blocks: mask,
            }
        }
    }

    fn pack(self) -> u64 {
        let (key, mask) = match self {
            Self::Free => (0, 0),
            Self::Whole { group, holders } => (group | WHOLE, holders),
            Self::Part { holder, blocks } => (holder, blocks),
        };
        (u64::from(key) << 32) | u64::from(mask)
    }
}

/// Bits 0 to `count` - 1.
pub(super) fn low_bits(count: u32) -> u32 {
    u32::MAX.checked_shr(32 - count.min(32)).unwrap_or(0)
}

impl Node {
    /// All cells of words, in a fixed order.
    #[inline]
    pub(super) fn cells<'a>(&'a self, more: &'a Words) -> Cells<'a> {
        Cells {
            words: self.words.iter(),
            link: &self.more,
            more,
        }
    }

    /// The blocks that `holder` holds.
    #[inline]
    pub(super) fn held_by(&self, holder: u32, more: &Words) -> u32 {
        // A holder that came to hold the whole node between the reading of its two words shows up in neither:
        // too little, which is allowed.
        for cell in self.cells(more) {
            match Word::unpack(cell.load(Ordering::Acquire)) {
                Word::Whole { group, holders }
                    if group == holder / 32 && holders & (1 << (holder % 32)) != 0 =>
                {
                    return low_bits(self.room.load(Ordering::Relaxed));
                }
                Word::Part {
                    holder: one,
                    blocks,
                } if one == holder => return blocks,
                Word::Free | Word::Whole { .. } | Word::Part { .. } => {}
            }
        }
        0
    }

    /// The blocks that anybody holds.
    pub(super) fn held(&self, more: &Words) -> u32 {
        let mut held = 0;
        for cell in self.cells(more) {
            held |= match Word::unpack(cell.load(Ordering::Relaxed)) {
                Word::Free => 0,
                Word::Whole { .. } => low_bits(self.room.load(Ordering::Relaxed)),
                Word::Part { blocks, .. } => blocks,
            };
        }
        held
    }

    /// Sets what `holder` holds. Only the writer calls it, after `make_room`.
    ///
    /// A reader sees the old or the new, or, where the holder's word changes kind, for a moment the lesser.
    pub(super) fn set_held_by(&self, holder: u32, blocks: u32, more: &Words) {
        let whole = low_bits(self.room.load(Ordering::Relaxed));
        let bit = 1 << (holder % 32);
        let (mut part, mut group, mut free) = (None, None, None);
        for cell in self.cells(more) {
            match Word::unpack(cell.load(Ordering::Relaxed)) {
                Word::Free => free = free.or(Some(cell)),
                Word::Whole {
                    group: one,
                    holders,
                } if one == holder / 32 => {
                    group = Some((cell, holders));
                }
                Word::Part { holder: one, .. } if one == holder => part = Some(cell),
                Word::Whole { .. } | Word::Part { .. } => {}
            }
        }
        let to_group = |holders| Word::Whole {
            group: holder / 32,
            holders,
        };
        let store = |cell: &AtomicU64, word: Word| cell.store(word.pack(), Ordering::Release);
        if blocks == whole {
            match (group, part, free) {
                (Some((cell, holders)), ..) => store(cell, to_group(holders | bit)),
                // Nobody of its group holds all: the holder's own cell becomes the group's.
                (None, Some(cell), _) => return store(cell, to_group(bit)),
                (None, None, Some(cell)) => store(cell, to_group(bit)),
                (None, None, None) => {}
            }
            if let Some(cell) = part {
                store(cell, Word::Free);
            }
        } else {
            let word = match blocks {
                0 => Word::Free,
                _ => Word::Part { holder, blocks },
            };
            if let Some(cell) = part {
                store(cell, word);
            } else if let Some((cell, _)) = group.filter(|(_, holders)| *holders == bit) {
                return store(cell, word);
            } else if let (Some(cell), true) = (free, blocks != 0) {
                store(cell, word);
            }
            if let Some((cell, holders)) = group.filter(|(_, holders)| holders & bit != 0) {
                let rest = holders & !bit;
                store(
                    cell,
                    if rest == 0 {
                        Word::Free
                    } else {
                        to_group(rest)
                    },
                );
            }
        }
    }

    /// Where to hang more words, if none is free.
    pub(super) fn end_of_words<'a>(&'a self, more: &'a Words) -> Option<&'a AtomicU32> {
        let mut cells = self.cells(more);
        let free = cells.any(|cell| Word::unpack(cell.load(Ordering::Relaxed)) == Word::Free);
        (!free).then_some(cells.link)
    }

    /// Takes the chain of further words off, to be freed once no reader can be in it.
    pub(super) fn take_more(&self, more: &Words, mut each: impl FnMut(u32)) {
        let mut at = self.more.swap(NONE, Ordering::Relaxed);
        while let Some(words) = more.get(at) {
            each(at);
            at = words.next.swap(NONE, Ordering::Relaxed);
        }
    }
}

/// Iterator over the cells of a node.
pub(super) struct Cells<'a> {
    words: std::slice::Iter<'a, AtomicU64>,
    link: &'a AtomicU32,
    more: &'a Words,
}

impl<'a> Iterator for Cells<'a> {
    type Item = &'a AtomicU64;

    #[inline(always)]
    fn next(&mut self) -> Option<&'a AtomicU64> {
        if let Some(cell) = self.words.next() {
            return Some(cell);
        }
        let at = self.link.load(Ordering::Acquire);
        if at == NONE {
            return None;
        }
        let more = self.more.get(at)?;
        self.words = more.words.iter();
        self.link = &more.next;
        self.words.next()
    }
}
