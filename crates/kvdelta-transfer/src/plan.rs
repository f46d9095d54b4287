//! What a prefill worker skips by a claim, and what it offers.

use kvdelta_indexer::BlockSize;
use kvdelta_protocol::{CacheGroup, DecodeCacheInfo};

use crate::claim::{Own, Refusal, believe};

/// The blocks that a prefill worker would offer of one cache group, in the order of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// What its blocks are.
    pub kind: CacheGroup,
    /// Tokens in one of its blocks, which may be another number than the engine hashes.
    pub block_size: BlockSize,
    /// Index of the first listed block, counted from the start of the prompt in blocks of this group. It has no
    /// meaning for a group of states.
    pub first_block: u32,
    /// Number of listed blocks; those of full and MLA attention have no hole.
    pub blocks: u32,
    /// Bytes of one block over all of the group's layers.
    pub bytes_per_block: u64,
}

/// What a prefill worker skips and what it offers; the lists have an entry for each group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferPlan {
    /// Blocks of the claim, all of which the decode worker must still hold. A group of larger blocks, or with
    /// no other block left to offer, offers from below.
    pub first_block: u32,
    /// Blocks that are skipped, from the front of the group's list.
    pub skip: Vec<u32>,
    /// Index of the first offered block, counted as [`Group::first_block`] is.
    pub group_first_blocks: Vec<u32>,
    /// Skipped blocks of all groups.
    pub skipped_blocks: u64,
    /// Offered blocks of all groups.
    pub offered_blocks: u64,
    /// Bytes of the skipped blocks; `u64::MAX` if there are more.
    pub skipped_bytes: u64,
    /// Bytes of the offered blocks; `u64::MAX` if there are more.
    pub offered_bytes: u64,
}

/// Plans what is skipped of `groups` by a claim that is believed.
///
/// A group of full or MLA attention skips its blocks that lie in the claim as a whole, but not its last one, so
/// that a lease is left to be given back. A window or a state is offered as it is listed: the claim says nothing
/// of it, since windows are evicted apart from the rest.
///
/// # Errors
/// Why nothing is skipped.
pub fn plan(claim: &DecodeCacheInfo, own: &Own, groups: &[Group]) -> Result<OfferPlan, Refusal> {
    believe(claim, own)?;
    let claimed_tokens =
        u64::from(claim.cached_prefix_blocks) * u64::from(u32::from(claim.block_size));
    let mut plan = OfferPlan {
        first_block: claim.cached_prefix_blocks,
        skip: Vec::with_capacity(groups.len()),
        group_first_blocks: Vec::with_capacity(groups.len()),
        skipped_blocks: 0,
        offered_blocks: 0,
        skipped_bytes: 0,
        offered_bytes: 0,
    };
    let mut skippable = false;
    for (index, group) in groups.iter().enumerate() {
        let skip = match group.kind {
            CacheGroup::FullAttention | CacheGroup::MlaAttention => {
                skippable = true;
                skipped(group, claimed_tokens)
            }
            CacheGroup::SlidingWindow | CacheGroup::Mamba => 0,
            kind => return Err(Refusal::UnknownGroup { group: index, kind }),
        };
        plan.add(group, skip);
    }
    if !skippable {
        return Err(Refusal::NothingSkippable {
            groups: groups.len(),
        });
    }
    if plan.skipped_blocks == 0 {
        return Err(Refusal::NothingToSkip { claimed_tokens });
    }
    Ok(plan)
}

/// Blocks of `group` that lie within the first `tokens` tokens, all but the last listed one.
fn skipped(group: &Group, tokens: u64) -> u32 {
    let within = tokens / u64::from(u32::from(group.block_size));
    let within = u32::try_from(within).unwrap_or(u32::MAX);
    within
        .saturating_sub(group.first_block)
        .min(group.blocks.saturating_sub(1))
}

impl OfferPlan {
    /// `skip` is such that the sum with the group's first block is no more than `u32::MAX`.
    fn add(&mut self, group: &Group, skip: u32) {
        let (skipped, offered) = (u64::from(skip), u64::from(group.blocks - skip));
        self.skip.push(skip);
        self.group_first_blocks.push(group.first_block + skip);
        self.skipped_blocks = self.skipped_blocks.saturating_add(skipped);
        self.offered_blocks = self.offered_blocks.saturating_add(offered);
        self.skipped_bytes = self
            .skipped_bytes
            .saturating_add(group.bytes_per_block.saturating_mul(skipped));
        self.offered_bytes = self
            .offered_bytes
            .saturating_add(group.bytes_per_block.saturating_mul(offered));
    }
}
