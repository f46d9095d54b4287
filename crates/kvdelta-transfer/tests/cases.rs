// SPDX-License-Identifier: Apache-2.0

//! Situations that went wrong elsewhere, with their numbers, and the limits of what is believed.

mod common;

use common::{HASH, claim, own, size};
use kvdelta_indexer::EngineHash;
use kvdelta_protocol::CacheGroup;
use kvdelta_transfer::{
    BlockRange, Confirmation, Group, OfferHead, OfferPlan, Own, Refusal, believe, confirm, pair,
    plan,
};

fn group(kind: CacheGroup, tokens: u32, first_block: u32, blocks: u32) -> Group {
    Group {
        kind,
        block_size: size(tokens),
        first_block,
        blocks,
        bytes_per_block: 100,
    }
}

fn full(tokens: u32, blocks: u32) -> Group {
    group(CacheGroup::FullAttention, tokens, 0, blocks)
}

const fn range(first: u32, blocks: u32) -> BlockRange {
    BlockRange { first, blocks }
}

/// What is copied where, by ids as an engine has them: of the offered blocks, the wanted ones, and their indices.
fn copies(prefill: (u32, &[u32]), decode: (u32, &[u32])) -> Vec<(u32, u32)> {
    let of = |(first, ids): (u32, &[u32])| range(first, u32::try_from(ids.len()).expect("few"));
    let paired = pair(of(prefill), of(decode));
    let part = |ids: &[u32], at: u32| -> Vec<u32> {
        let at = usize::try_from(at).expect("small");
        let blocks = usize::try_from(paired.blocks).expect("small");
        ids.get(at..at + blocks).expect("within").to_vec()
    };
    let from = part(prefill.1, paired.prefill_at);
    let to = part(decode.1, paired.decode_at);
    from.into_iter().zip(to).collect()
}

// The decode prompt of 9 tokens has one block of 4 more than the prefill prompt of 8.
#[test]
fn b19_blocks_are_paired_by_index_and_never_by_count() {
    let prefill = (0, &[10, 11][..]);
    assert_eq!(
        copies(prefill, (0, &[20, 21, 22])),
        [(10, 20), (11, 21)],
        "(a) nothing cached"
    );
    assert_eq!(
        copies(prefill, (1, &[21, 22])),
        [(11, 21)],
        "(b) lists of one length, of different blocks"
    );
    assert_eq!(
        copies(prefill, (2, &[22])),
        [],
        "(c) past the prefill's end"
    );
    assert_eq!(
        copies(prefill, (2, &[])),
        [],
        "(d) a group that needs nothing is not the whole list"
    );
}

#[test]
fn b19_a_cut_offer_is_paired_the_same_way() {
    // Cut at block 1: 11 is the whole list.
    let prefill = (1, &[11][..]);
    assert_eq!(copies(prefill, (1, &[21, 22])), [(11, 21)]);
    assert_eq!(copies(prefill, (2, &[22])), []);
    assert_eq!(copies(prefill, (0, &[20, 21, 22])), [(11, 21)]);
    assert_eq!(copies(prefill, (0, &[20])), []);
}

// B20: both blocks of a prompt of 8 tokens are cached. The claim may say 1, never 2.
#[test]
fn b20_the_last_token_is_left_to_decode() {
    assert!(claim(2, 4).check(8).is_err());
    assert_eq!(claim(1, 4).check(8), Ok(()));
    let plan = plan(&claim(1, 4), &own(4), &[full(4, 2)]).expect("planned");
    assert_eq!((plan.skip, plan.group_first_blocks), (vec![1], vec![1]));
    // 9 tokens, of which 8 are cached: both whole blocks are skipped, the third stays.
    assert_eq!(claim(2, 4).check(9), Ok(()));
    assert!(claim(1, 4).check(1).is_err(), "a prompt of one token");
}

// The decode worker holds the whole prompt, aligned to blocks: it reads nothing, or its last block again.
#[test]
fn b20_a_full_hit_that_ends_with_a_block() {
    let (claim, groups) = (claim(1, 4), [full(4, 2)]);
    let plan = plan(&claim, &own(4), &groups).expect("planned");
    let offer = OfferHead::cut(&claim, &plan);
    for held_tokens in [4, 7, 8] {
        assert_eq!(
            confirm(&offer, size(4), held_tokens, Some(HASH)),
            Confirmation::Covered { held_blocks: 1 },
            "{held_tokens} tokens"
        );
    }
    assert_eq!(copies((1, &[11]), (2, &[])), []);
    assert_eq!(copies((1, &[11]), (1, &[21])), [(11, 21)]);
}

// Window 8, prompt of 24 tokens in blocks of 4, full attention claimed for 5 blocks.
#[test]
fn b28_a_window_is_offered_whole() {
    let groups = [full(4, 6), group(CacheGroup::SlidingWindow, 4, 4, 2)];
    let plan = plan(&claim(5, 4), &own(4), &groups).expect("planned");
    let expected = OfferPlan {
        first_block: 5,
        skip: vec![5, 0],
        group_first_blocks: vec![5, 4],
        skipped_blocks: 5,
        offered_blocks: 3,
        skipped_bytes: 500,
        offered_bytes: 300,
    };
    assert_eq!(plan, expected);
}

#[test]
fn b28_a_prompt_shorter_than_the_window() {
    let groups = [group(CacheGroup::SlidingWindow, 4, 0, 2), full(4, 2)];
    let plan = plan(&claim(1, 4), &own(4), &groups).expect("planned");
    assert_eq!(
        (plan.skip, plan.group_first_blocks),
        (vec![0, 1], vec![0, 1])
    );
}

#[test]
fn b28_a_state_is_offered_whole() {
    let groups = [
        group(CacheGroup::Mamba, 1024, 0, 1),
        group(CacheGroup::MlaAttention, 4, 0, 6),
    ];
    let plan = plan(&claim(5, 4), &own(4), &groups).expect("planned");
    assert_eq!(plan.skip, [0, 5]);
}

// B29: hashes of blocks of another size cannot be compared, whatever the ratio.
#[test]
fn b29_unequal_block_sizes_are_refused_in_tokens() {
    for (decode, prefill, cached) in [(16, 32, 3), (64, 16, 1), (16, 24, 3), (1, 16, 16)] {
        let refused = plan(&claim(cached, decode), &own(prefill), &[full(prefill, 9)]);
        let expected = Refusal::UnequalBlocks {
            claim_tokens: decode,
            own_tokens: prefill,
        };
        assert_eq!(refused, Err(expected));
        assert_eq!(expected.as_label(), "capability");
        let text = expected.to_string();
        assert!(
            text.contains(&format!("{decode} tokens"))
                && text.contains(&format!("blocks of {prefill}")),
            "{text}"
        );
    }
}

// A group may have larger or smaller blocks than the ones that are hashed.
#[test]
fn b29_groups_of_other_blocks_skip_in_tokens_rounded_down() {
    let cases = [
        // tokens of a hashed block, claimed, tokens of the group's block, its blocks; skipped
        (16, 3, 32, 4, 1),
        (64, 1, 16, 9, 4),
        (16, 3, 24, 9, 2),
        (16, 4, 24, 9, 2),
        (32, 5, 32, 6, 5),
        (16, 40, 1, 1000, 640),
        (1, 31, 16, 3, 1),
    ];
    for (hashed, claimed, tokens, blocks, skipped) in cases {
        let plan = plan(
            &claim(claimed, hashed),
            &own(hashed),
            &[full(tokens, blocks)],
        );
        let plan = plan.expect("planned");
        assert_eq!(
            (plan.first_block, plan.skip, plan.group_first_blocks),
            (claimed, vec![skipped], vec![skipped]),
            "{claimed} of {hashed} in blocks of {tokens}"
        );
    }
    let too_large = plan(&claim(3, 16), &own(16), &[full(64, 2)]);
    assert_eq!(
        too_large,
        Err(Refusal::NothingToSkip { claimed_tokens: 48 })
    );
}

// 48 tokens claimed, so blocks of 32 are offered from the second on. What is sent twice goes nowhere but to where the
// decode worker wants it, never to the block that it holds already.
#[test]
fn b29_tokens_that_are_sent_twice_overwrite_no_block_that_is_held() {
    let plan = plan(&claim(3, 16), &own(16), &[full(32, 4)]).expect("planned");
    assert_eq!(plan.group_first_blocks, [1]);
    // It found 64 tokens, so the second block is shared by now: it wants the third and fourth.
    assert_eq!(
        copies((1, &[11, 12, 13]), (2, &[22, 23])),
        [(12, 22), (13, 23)]
    );
}

#[test]
fn nothing_is_believed_by_another_hash() {
    let groups = [full(4, 6)];
    for (hash, reason) in [
        (
            Some(EngineHash(HASH.0 ^ 1)),
            Refusal::OtherContent {
                claimed: HASH.0,
                own: HASH.0 ^ 1,
            },
        ),
        (
            Some(EngineHash(0)),
            Refusal::OtherContent {
                claimed: HASH.0,
                own: 0,
            },
        ),
        (None, Refusal::NoHash { last_block: 4 }),
    ] {
        let own = Own { hash, ..own(4) };
        assert_eq!(believe(&claim(5, 4), &own), Err(reason));
        assert_eq!(plan(&claim(5, 4), &own, &groups), Err(reason));
        assert_eq!(reason.as_label(), "content");
    }
    assert_eq!(believe(&claim(5, 4), &own(4)), Ok(()));
}

#[test]
fn nothing_is_skipped_where_it_could_not_be_kept_or_understood() {
    let without_cache = Own {
        prefix_caching: false,
        ..own(4)
    };
    let unknown = group(CacheGroup::Unknown, 4, 0, 6);
    let window = group(CacheGroup::SlidingWindow, 4, 4, 2);
    let cases = [
        (without_cache, vec![full(4, 6)], Refusal::PrefixCachingOff),
        (
            own(4),
            vec![full(4, 6), window, unknown],
            Refusal::UnknownGroup {
                group: 2,
                kind: CacheGroup::Unknown,
            },
        ),
        (
            own(4),
            vec![window],
            Refusal::NothingSkippable { groups: 1 },
        ),
        (own(4), vec![], Refusal::NothingSkippable { groups: 0 }),
    ];
    for (own, groups, reason) in cases {
        assert_eq!(plan(&claim(5, 4), &own, &groups), Err(reason));
        assert_eq!(reason.as_label(), "capability");
    }
}

#[test]
fn one_block_of_each_listed_group_stays_offered() {
    // A claim as long as the list, and one far beyond it.
    for claimed in [6, 7, u32::MAX] {
        let groups = [
            full(4, 6),
            full(4, 0),
            full(4, 1),
            group(CacheGroup::FullAttention, 4, 2, 3),
        ];
        let plan = plan(&claim(claimed, 4), &own(4), &groups).expect("planned");
        assert_eq!(plan.first_block, claimed);
        assert_eq!(plan.skip, [5, 0, 0, 2]);
        assert_eq!(plan.group_first_blocks, [5, 0, 0, 4]);
        assert_eq!((plan.skipped_blocks, plan.offered_blocks), (7, 3));
    }
}

#[test]
fn a_claim_that_leaves_nothing_to_skip_is_invalid() {
    for (claimed, groups) in [
        (0, vec![full(4, 6)]),
        (5, vec![full(4, 1)]),
        (5, vec![full(4, 0)]),
        // The list starts where the claim ends.
        (5, vec![group(CacheGroup::FullAttention, 4, 5, 3)]),
    ] {
        let refused = plan(&claim(claimed, 4), &own(4), &groups).expect_err("refused");
        let claimed_tokens = u64::from(claimed) * 4;
        assert_eq!(refused, Refusal::NothingToSkip { claimed_tokens });
        assert_eq!(refused.as_label(), "invalid");
    }
}

// With a speculative head that drops the last block of a hit, a claim may be one block too long.
#[test]
fn a_claim_of_one_block_too_many_is_stale_by_one() {
    let claim = claim(6, 32);
    let plan = plan(&claim, &own(32), &[full(32, 7)]).expect("planned");
    let offer = OfferHead::cut(&claim, &plan);
    assert_eq!(
        confirm(&offer, size(32), 5 * 32, Some(HASH)),
        Confirmation::Stale {
            held_blocks: 5,
            short_blocks: 1
        }
    );
}

#[test]
fn content_comes_before_coverage() {
    let claim = claim(6, 32);
    let plan = plan(&claim, &own(32), &[full(32, 7)]).expect("planned");
    let offer = OfferHead::cut(&claim, &plan);
    let other = Confirmation::OtherContent { short_blocks: 6 };
    for held_tokens in [0, 5 * 32, 6 * 32, usize::MAX] {
        let not_ours = Some(EngineHash(HASH.0 ^ 1));
        assert_eq!(confirm(&offer, size(32), held_tokens, not_ours), other);
        assert_eq!(confirm(&offer, size(32), held_tokens, None), other);
        assert_eq!(confirm(&offer, size(16), held_tokens, Some(HASH)), other);
    }
    assert_eq!((other.held_blocks(), other.short_blocks()), (0, 6));
}

#[test]
fn a_prefix_that_is_gone_in_part_or_whole_is_stale() {
    let claim = claim(6, 32);
    let plan = plan(&claim, &own(32), &[full(32, 7)]).expect("planned");
    let offer = OfferHead::cut(&claim, &plan);
    // All of it, from a block in the middle on, the tail; a lookup from position 0 ends at the first hole.
    for (held_tokens, held, short) in [(0, 0, 6), (31, 0, 6), (96, 3, 3), (191, 5, 1), (192, 6, 0)]
    {
        let said = confirm(&offer, size(32), held_tokens, Some(HASH));
        assert_eq!(
            (said.held_blocks(), said.short_blocks()),
            (held, short),
            "{held_tokens} tokens"
        );
        let covered = matches!(said, Confirmation::Covered { .. });
        assert_eq!(covered, short == 0);
    }
}

#[test]
fn no_number_overflows() {
    let most = u32::MAX;
    for (hashed, tokens) in [(1, 1), (most, 1), (1, most), (most, most)] {
        let groups: Vec<Group> = [0, 1, most]
            .into_iter()
            .flat_map(|first| [1, most].map(|blocks| (first, blocks)))
            .map(|(first, blocks)| Group {
                bytes_per_block: u64::MAX,
                ..group(CacheGroup::FullAttention, tokens, first, blocks)
            })
            .collect();
        let claim = claim(most, hashed);
        if let Ok(plan) = plan(&claim, &own(hashed), &groups) {
            assert_eq!(plan.skipped_bytes, u64::MAX);
            assert_eq!(plan.offered_bytes, u64::MAX);
            let offer = OfferHead::cut(&claim, &plan);
            for held in [0, 1, usize::MAX] {
                let said = confirm(&offer, size(hashed), held, Some(HASH));
                assert_eq!(
                    said.held_blocks().checked_add(said.short_blocks()),
                    Some(most)
                );
            }
        } else {
            assert_eq!(
                (hashed, tokens),
                (1, most),
                "one block of the group at most"
            );
        }
    }
    let all = range(0, most);
    assert_eq!(pair(all, all).blocks, most);
    assert_eq!(pair(range(most, most), range(most, most)).blocks, most);
    let paired = pair(all, range(most, most));
    assert_eq!(
        (paired.prefill_at, paired.decode_at, paired.blocks),
        (0, 0, 0)
    );
    let paired = pair(range(most - 1, 2), range(0, most));
    assert_eq!(
        (paired.prefill_at, paired.decode_at, paired.blocks),
        (0, most - 1, 1)
    );
}
