// SPDX-License-Identifier: Apache-2.0

//! Every function against a naive one that goes through tokens and blocks one by one.

mod common;

use std::collections::BTreeSet;

use common::{HASH, claim, own, size};
use kvdelta_indexer::{BlockSize, EngineHash, WorkerId};
use kvdelta_protocol::{CacheGroup, DecodeCacheInfo, VERSION};
use kvdelta_transfer::{
    BlockRange, Confirmation, Group, OfferHead, OfferPlan, Own, Refusal, confirm, pair, plan,
};
use proptest::prelude::*;

const KINDS: [CacheGroup; 5] = [
    CacheGroup::FullAttention,
    CacheGroup::MlaAttention,
    CacheGroup::SlidingWindow,
    CacheGroup::Mamba,
    CacheGroup::Unknown,
];

/// Tokens of block `index`.
fn tokens_of(index: u32, block_size: BlockSize) -> impl Iterator<Item = u32> {
    let tokens = u32::from(block_size);
    index * tokens..(index + 1) * tokens
}

/// Indices of the blocks that `group` lists.
fn listed(group: &Group) -> Vec<u32> {
    (group.first_block..group.first_block + group.blocks).collect()
}

/// What may be skipped of `group` where the tokens `held` are on the other side: whole blocks of full attention,
/// and one block stays.
fn naive_skipped(group: &Group, held: &BTreeSet<u32>) -> Vec<u32> {
    if !matches!(
        group.kind,
        CacheGroup::FullAttention | CacheGroup::MlaAttention
    ) {
        return Vec::new();
    }
    let mut blocks = listed(group);
    blocks.pop();
    let whole =
        |index: &u32| tokens_of(*index, group.block_size).all(|token| held.contains(&token));
    blocks.into_iter().filter(whole).collect()
}

fn naive_plan(claim: &DecodeCacheInfo, groups: &[Group]) -> Result<OfferPlan, &'static str> {
    let held: BTreeSet<u32> =
        (0..claim.cached_prefix_blocks * u32::from(claim.block_size)).collect();
    let full = [CacheGroup::FullAttention, CacheGroup::MlaAttention];
    if groups.iter().any(|group| group.kind == CacheGroup::Unknown)
        || !groups.iter().any(|group| full.contains(&group.kind))
    {
        return Err("capability");
    }
    let mut plan = OfferPlan {
        first_block: claim.cached_prefix_blocks,
        skip: Vec::new(),
        group_first_blocks: Vec::new(),
        skipped_blocks: 0,
        offered_blocks: 0,
        skipped_bytes: 0,
        offered_bytes: 0,
    };
    for group in groups {
        let skipped = naive_skipped(group, &held);
        let mut offered = listed(group);
        offered.retain(|block| !skipped.contains(block));
        for _ in &skipped {
            plan.skipped_blocks += 1;
            plan.skipped_bytes += group.bytes_per_block;
        }
        for _ in &offered {
            plan.offered_blocks += 1;
            plan.offered_bytes += group.bytes_per_block;
        }
        plan.skip.push(u32::try_from(skipped.len()).expect("few"));
        plan.group_first_blocks
            .push(offered.first().copied().unwrap_or(group.first_block));
    }
    if plan.skipped_blocks == 0 {
        return Err("invalid");
    }
    Ok(plan)
}

prop_compose! {
    fn any_group(kinds: usize, sizes: std::ops::RangeInclusive<u32>, numbers: u32)(
        kind in proptest::sample::select(&KINDS[..kinds]),
        tokens in sizes,
        first_block in prop_oneof![3 => Just(0), 1 => 0..=numbers],
        blocks in 0..=numbers,
        bytes_per_block in 0..1000_u64,
    ) -> Group {
        Group { kind, block_size: size(tokens), first_block, blocks, bytes_per_block }
    }
}

/// What each side knows, as the small engine of [`a_transfer_leaves_right_blocks`] runs it.
#[derive(Clone, Debug)]
struct Transfer {
    block_size: u32,
    /// Blocks of the prefill prompt.
    prefilled: u32,
    claimed: u32,
    /// Blocks that the decode worker finds in its cache.
    held: u32,
    /// Blocks of the decode prompt.
    wanted: u32,
    same_prompt: bool,
}

fn any_transfer() -> impl Strategy<Value = Transfer> {
    (1..5_u32, 1..20_u32, 0..4_u32, any::<bool>()).prop_flat_map(
        |(block_size, prefilled, more, same_prompt)| {
            // A claim of as much as a prompt may have claimed, and what became of it.
            (1..=prefilled, 0..=prefilled + more).prop_map(move |(claimed, held)| Transfer {
                block_size,
                prefilled,
                claimed,
                held,
                wanted: prefilled + more,
                same_prompt,
            })
        },
    )
}

proptest! {
    #[test]
    fn a_plan_is_the_naive_one(
        claimed in 0..12_u32,
        tokens in 1..9_u32,
        groups in prop_oneof![
            5 => prop::collection::vec(any_group(4, 1..=20, 12), 0..5),
            1 => prop::collection::vec(any_group(5, 1..=20, 12), 0..5),
        ],
    ) {
        let claim = claim(claimed, tokens);
        let planned = plan(&claim, &own(tokens), &groups).map_err(Refusal::as_label);
        prop_assert_eq!(planned, naive_plan(&claim, &groups));
    }

    #[test]
    fn nothing_is_skipped_without_a_reason_to_believe(
        claimed: u32,
        sizes in (1..=u32::MAX, 1..=u32::MAX),
        prefix_caching: bool,
        hash in prop_oneof![Just(None), Just(Some(HASH.0)), any::<u64>().prop_map(Some)],
        groups in prop::collection::vec(any_group(5, 1..=u32::MAX, u32::MAX), 0..4),
        equal: bool,
    ) {
        let tokens = if equal { sizes.0 } else { sizes.1 };
        let own = Own { block_size: size(tokens), prefix_caching, hash: hash.map(EngineHash) };
        let planned = plan(&claim(claimed, sizes.0), &own, &groups);
        let believable = prefix_caching && tokens == sizes.0 && hash == Some(HASH.0);
        prop_assert!(believable || planned.is_err());
        if let Err(refusal) = planned {
            prop_assert!(refusal.to_string().ends_with("; sending all"));
        }
    }

    #[test]
    fn any_numbers_give_a_plan_that_adds_up(
        claimed: u32,
        tokens in prop_oneof![1..=8_u32, 1..=u32::MAX],
        groups in prop::collection::vec(any_group(4, 1..=u32::MAX, u32::MAX), 0..6),
    ) {
        let claim = claim(claimed, tokens);
        if let Ok(plan) = plan(&claim, &own(tokens), &groups) {
            let claimed_tokens = u128::from(claimed) * u128::from(tokens);
            for ((group, skip), first) in groups.iter().zip(&plan.skip).zip(&plan.group_first_blocks) {
                prop_assert_eq!(group.first_block.checked_add(*skip), Some(*first));
                prop_assert!(*skip == 0 || *skip < group.blocks);
                let end = u128::from(*first) * u128::from(u32::from(group.block_size));
                prop_assert!(*skip == 0 || end <= claimed_tokens);
            }
            let listed: u64 = groups.iter().map(|group| u64::from(group.blocks)).sum();
            prop_assert_eq!(plan.skipped_blocks + plan.offered_blocks, listed);
            prop_assert_eq!(OfferHead::cut(&claim, &plan).check(), Ok(()));
        }
    }

    #[test]
    fn a_confirmation_is_the_naive_one(
        skipped in 1..20_u32, tokens in 1..9_u32, held_tokens in 0..200_u32, same_hash: bool,
    ) {
        let offer = OfferHead {
            version: VERSION,
            claim_id: "c-1".to_owned(),
            decode_worker_id: WorkerId(42),
            prefix_hash: EngineHash(7),
            block_size: size(tokens),
            first_block: skipped,
            group_first_blocks: vec![skipped],
        };
        let hash = EngineHash(if same_hash { 7 } else { 8 });
        let held_tokens_usize = usize::try_from(held_tokens).expect("small");
        let said = confirm(&offer, size(tokens), held_tokens_usize, Some(hash));
        let held: BTreeSet<u32> = (0..held_tokens).collect();
        let whole = |index: &u32| tokens_of(*index, size(tokens)).all(|token| held.contains(&token));
        let lacks = (0..skipped).filter(|index| !whole(index)).count();
        let lacks = u32::try_from(lacks).expect("few");
        let expected = match (same_hash, lacks) {
            (false, _) => Confirmation::OtherContent { short_blocks: skipped },
            (true, 0) => Confirmation::Covered { held_blocks: skipped },
            (true, _) => Confirmation::Stale { held_blocks: skipped - lacks, short_blocks: lacks },
        };
        prop_assert_eq!(said, expected);
    }

    #[test]
    fn pairs_are_the_naive_ones(
        prefill in (0..30_u32, 0..30_u32), decode in (0..30_u32, 0..30_u32),
    ) {
        let paired = pair(
            BlockRange { first: prefill.0, blocks: prefill.1 },
            BlockRange { first: decode.0, blocks: decode.1 },
        );
        let mut expected = Vec::new();
        for p in 0..prefill.1 {
            for d in 0..decode.1 {
                if prefill.0 + p == decode.0 + d {
                    expected.push((p, d));
                }
            }
        }
        let said: Vec<(u32, u32)> = (0..paired.blocks)
            .map(|n| (paired.prefill_at + n, paired.decode_at + n))
            .collect();
        prop_assert_eq!(&said, &expected);
        prop_assert!(!expected.is_empty() || paired == Default::default());
    }

    #[test]
    fn pairs_of_any_ranges_lie_in_both(
        prefill in (any::<u32>(), any::<u32>()), decode in (any::<u32>(), any::<u32>()),
    ) {
        let prefill = BlockRange { first: prefill.0, blocks: prefill.1 };
        let decode = BlockRange { first: decode.0, blocks: decode.1 };
        let paired = pair(prefill, decode);
        for (at, range) in [(paired.prefill_at, prefill), (paired.decode_at, decode)] {
            prop_assert!(u64::from(at) + u64::from(paired.blocks) <= u64::from(range.blocks));
        }
        if paired.blocks > 0 {
            prop_assert_eq!(
                u64::from(prefill.first) + u64::from(paired.prefill_at),
                u64::from(decode.first) + u64::from(paired.decode_at)
            );
        }
    }

    /// From claim to read, with blocks that know their content: after it every block of the decode worker is
    /// right, or is one that it computes, and none that it held was written.
    #[test]
    fn a_transfer_leaves_right_blocks(run in any_transfer()) {
        let content = |prompt: u32, index: u32| prompt * 1000 + index;
        let at = |index: u32| usize::try_from(index).expect("small");
        let hash = |prompt: u32| EngineHash(u64::from(content(prompt, run.claimed - 1)));
        let (prefill_prompt, decode_prompt) = (1, if run.same_prompt { 1 } else { 2 });

        let claim = DecodeCacheInfo { prefix_hash: hash(prefill_prompt), ..claim(run.claimed, run.block_size) };
        let own = Own { hash: Some(hash(prefill_prompt)), ..own(run.block_size) };
        let group = Group {
            kind: CacheGroup::FullAttention,
            block_size: size(run.block_size),
            first_block: 0,
            blocks: run.prefilled,
            bytes_per_block: 1,
        };
        let all: Vec<u32> = (0..run.prefilled).map(|index| content(prefill_prompt, index)).collect();
        let Ok(plan) = plan(&claim, &own, &[group]) else {
            prop_assert_eq!(run.prefilled, 1);
            return Ok(());
        };
        let offer = OfferHead::cut(&claim, &plan);
        prop_assert_eq!(offer.check(), Ok(()));
        let offered = all.get(at(plan.skip[0])..).expect("within");
        prop_assert!(!offered.is_empty());

        let mut blocks: Vec<Option<u32>> = (0..run.wanted)
            .map(|index| (index < run.held).then(|| content(decode_prompt, index)))
            .collect();
        let held_tokens = at(run.held * run.block_size);
        let said = confirm(&offer, size(run.block_size), held_tokens, Some(hash(decode_prompt)));
        let covered = run.same_prompt && run.held >= run.claimed;
        prop_assert_eq!(matches!(said, Confirmation::Covered { .. }), covered);
        if !covered {
            return Ok(());
        }
        let wants = BlockRange { first: run.held, blocks: run.wanted - run.held };
        let offers = BlockRange {
            first: offer.group_first_blocks[0],
            blocks: u32::try_from(offered.len()).expect("few"),
        };
        let paired = pair(offers, wants);
        for n in 0..paired.blocks {
            let to = at(run.held + paired.decode_at + n);
            prop_assert_eq!(blocks[to], None, "written over a block that was held");
            blocks[to] = Some(offered[at(paired.prefill_at + n)]);
        }
        for (index, block) in (0..run.wanted).zip(blocks) {
            let expected = (index < run.prefilled.max(run.held)).then(|| content(decode_prompt, index));
            prop_assert_eq!(block, expected, "block {}", index);
        }
    }
}
