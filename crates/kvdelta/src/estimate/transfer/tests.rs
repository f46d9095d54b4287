// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;

use super::*;
use crate::estimate::model::{Cache, Dtype, Layers};
use crate::estimate::work::{Attention, Work};

fn shape(kv_heads: u64, dim: u64, layers: &[(u64, Option<u64>)], dtype: Dtype) -> Shape {
    let cache = Cache::Heads {
        kv_heads,
        key_dim: dim,
        value_dim: dim,
    };
    let layers = layers.iter().map(|&(count, window_tokens)| Layers {
        count,
        window_tokens,
    });
    Shape::new(cache, layers.collect(), dtype).unwrap()
}

fn llama(dtype: Dtype) -> Shape {
    shape(8, 128, &[(80, None)], dtype)
}

fn sizes(shape: &Shape, tp: u64, (prompt, cached, block): (u64, u64, u64)) -> (u64, u64, u64) {
    let request = Request::new(prompt, cached, block).unwrap();
    let sizes = Sizes::in_all(shape, tp, &request).unwrap();
    (sizes.full_bytes, sizes.delta_bytes, sizes.kept_bytes)
}

#[test]
fn whole_blocks_count_and_never_the_last_token() {
    for (prompt, cached, block, blocks, overlap, delta) in [
        (2148, 2144, 32, 68, 67, 1),
        (2148, 2148, 32, 68, 67, 1),
        (2148, 2047, 32, 68, 63, 5),
        (2048, 2048, 32, 64, 63, 1),
        (2049, 2048, 32, 65, 64, 1),
        (8, 8, 4, 2, 1, 1),
        (9, 8, 4, 3, 2, 1),
        (1, 1, 16, 1, 0, 1),
        (1, 0, 1, 1, 0, 1),
        (100, 0, 16, 7, 0, 7),
    ] {
        let request = Request::new(prompt, cached, block).unwrap();
        let counted = (
            request.prompt_blocks(),
            request.overlap_blocks(),
            request.delta_blocks(),
        );
        assert_eq!(
            counted,
            (blocks, overlap, delta),
            "{prompt} {cached} {block}"
        );
        assert_eq!(request.missing_tokens(), prompt - overlap * block);
    }
}

#[test]
fn requests_that_cannot_be() {
    use RequestError::{Block, Cached, Prompt};
    for (prompt, cached, block, expected) in [
        (0, 0, 16, Prompt(0)),
        (MAX_PROMPT_TOKENS + 1, 0, 16, Prompt(MAX_PROMPT_TOKENS + 1)),
        (100, 0, 0, Block(0)),
        (100, 0, u64::MAX, Block(u64::MAX)),
        (
            100,
            101,
            16,
            Cached {
                cached: 101,
                prompt: 100,
            },
        ),
    ] {
        assert_eq!(Request::new(prompt, cached, block), Err(expected));
    }
}

/// What vLLM's NIXL connector read, with the tests' model of 4 KiB a token and blocks of 32.
#[test]
fn bytes_as_real_engines_moved_them() {
    let tiny = shape(2, 64, &[(4, None)], Dtype::Fp32);
    assert_eq!(sizes(&tiny, 1, (2148, 0, 32)).0, 8_912_896);
    assert_eq!(sizes(&tiny, 1, (2148, 2048, 32)).1, 524_288);
}

#[test]
fn bytes_by_hand() {
    let full = 131_072 * 327_680;
    let delta = 16_384 * 327_680;
    let request = (131_072, 114_688, 16);
    assert_eq!(sizes(&llama(Dtype::Fp16), 1, request), (full, delta, delta));
    assert_eq!(sizes(&llama(Dtype::Fp16), 8, request), (full, delta, delta));
    // Two ranks hold each head.
    let twice = (2 * full, 2 * delta, 2 * delta);
    assert_eq!(sizes(&llama(Dtype::Fp16), 16, request), twice);
    let half = (full / 2, delta / 2, delta / 2);
    assert_eq!(sizes(&llama(Dtype::Fp8), 1, request), half);
}

#[test]
fn of_a_window_its_blocks_and_one_more_travel() {
    // 12 full layers, 12 with a window of 128 tokens: 8 blocks of 16, and one.
    let gpt_oss = shape(8, 64, &[(12, None), (12, Some(128))], Dtype::Bf16);
    let block = 2 * 8 * 64 * 2 * 16 * 12;
    let counted = sizes(&gpt_oss, 1, (1600, 800, 16));
    assert_eq!(
        counted,
        ((100 + 9) * block, (50 + 9) * block, (50 + 9) * block)
    );
    // D lacks less than the window: P keeps all of it.
    let counted = sizes(&gpt_oss, 1, (1600, 1536, 16));
    assert_eq!(
        counted,
        ((100 + 9) * block, (4 + 4) * block, (4 + 9) * block)
    );
    // A prompt within the window.
    let counted = sizes(&gpt_oss, 1, (64, 0, 16));
    assert_eq!(counted, (8 * block, 8 * block, 8 * block));
}

#[test]
fn times_by_hand() {
    let link = Link {
        gbit_per_second: 100.0,
        overhead_seconds: 0.001,
    };
    assert!((link.seconds(12_500_000_000) - 1.001).abs() < 1e-12);
    assert_eq!(link.seconds(0), 0.001);
    let rate = equal_gbit_per_second(12_500_000_000, 2.001, 0.001).unwrap();
    assert!((rate - 50.0).abs() < 1e-9);
    assert_eq!(equal_gbit_per_second(1, 0.001, 0.001), None);
}

/// 1,000 tokens a second against 4,096 bytes a token: equal at 32.8 Mbit/s.
#[test]
fn without_overhead_and_attention_the_cached_share_decides_nothing() {
    let tiny = shape(2, 64, &[(4, None)], Dtype::Fp32);
    let request = Request::new(1024, 0, 32).unwrap();
    let wins = |gbit_per_second, overhead_seconds| {
        let link = Link {
            gbit_per_second,
            overhead_seconds,
        };
        delta_wins(&tiny, 1, &request, &link, &Speed::Rate(1000.0)).unwrap()
    };
    assert_eq!(wins(0.04, 0.0), [0..=992]);
    assert_eq!(wins(0.03, 0.0), []);
    // At 10 times that rate a block takes 3.2 ms against 32: an overhead of 100 ms takes four.
    assert_eq!(wins(0.327_68, 0.1), [0..=896]);
}

#[test]
fn long_prompts_make_the_delta_win_from_some_share_on() {
    let shape = llama(Dtype::Fp16);
    let work = Work {
        params: 68_451_041_280.0,
        attention: Some(Attention {
            heads: 64,
            key_dim: 128,
            value_dim: 128,
        }),
        layers: shape.layers().to_vec(),
    };
    let device = crate::estimate::device::Device::named("h100").unwrap();
    let precision = crate::estimate::device::Precision::Bf16;
    let speed = Speed::of_device(work, device, precision, 8, 0.5).unwrap();
    let request = Request::new(131_072, 0, 16).unwrap();
    // At 25 Gbit/s a token travels for 105 us; computing takes 35 us for the first one, 121 for the last.
    let link = Link {
        gbit_per_second: 25.0,
        overhead_seconds: 0.0,
    };
    let wins = delta_wins(&shape, 1, &request, &link, &speed).unwrap();
    assert_eq!(wins.len(), 1);
    assert_eq!(*wins[0].end(), 131_056);
    // Attention: 2 x 256 x 64 x 80 operations for each token before, over all that is missing.
    let (flops, token) = (0.5 * 8.0 * 989.4e12, 327_680.0 * 8.0 / 25e9);
    let before = (token * flops - 2.0 * 68_451_041_280.0) / 2_621_440.0;
    let above = *wins[0].start() as f64 - (2.0 * before - 131_073.0);
    assert!(0.0 < above && above <= 16.0, "{above}");
}

fn any_shape() -> impl Strategy<Value = Shape> {
    let dtypes = [Dtype::Bf16, Dtype::Fp32, Dtype::Fp8, Dtype::Nvfp4];
    let window = prop::option::of(1_u64..5000);
    let heads = prop::sample::select(vec![1_u64, 2, 4, 8, 16]);
    let dtype = prop::sample::select(dtypes.to_vec());
    (heads, 1_u64..9, 1_u64..50, 0_u64..50, window, dtype).prop_map(
        |(heads, dim, full, windowed, window, dtype)| {
            shape(heads, 16 * dim, &[(full, None), (windowed, window)], dtype)
        },
    )
}

fn any_request() -> impl Strategy<Value = (u64, u64, u64)> {
    (1_u64..40_000, 1_u64..600)
        .prop_flat_map(|(prompt, block)| (Just(prompt), 0..=prompt, Just(block)))
}

proptest! {
    #[test]
    fn a_delta_is_no_more_than_all_and_at_least_a_block(
        shape in any_shape(), request in any_request(), log_tp in 0_u32..6,
    ) {
        let (full, delta, kept) = sizes(&shape, 1 << log_tp, request);
        prop_assert!(0 < delta && delta <= kept && kept <= full);
        if request.1 == 0 {
            prop_assert_eq!(delta, full);
        }
    }

    #[test]
    fn more_cached_is_never_more_to_move(
        shape in any_shape(), request in any_request(), more in 0_u64..40_000,
    ) {
        let (prompt, cached, block) = request;
        let (full, delta, kept) = sizes(&shape, 1, request);
        let later = sizes(&shape, 1, (prompt, (cached + more).min(prompt), block));
        prop_assert!(later.0 == full && later.1 <= delta && later.2 <= kept);
    }

    #[test]
    fn all_ranks_hold_at_least_each_value_once(
        shape in any_shape(), request in any_request(), log_tp in 0_u32..6,
    ) {
        let tp = 1 << log_tp;
        let (full, delta, _) = sizes(&shape, 1, request);
        let all = sizes(&shape, tp, request);
        let copies = shape.copies(tp).unwrap();
        prop_assert_eq!((all.0, all.1), (full * copies, delta * copies));
        let (prompt, cached, block) = request;
        let request = Request::new(prompt, cached, block).unwrap();
        let rank = Sizes::a_rank(&shape, tp, &request).unwrap();
        prop_assert_eq!(rank.full_bytes * tp, all.0);
    }

    #[test]
    fn the_ranges_are_where_the_delta_wins(
        shape in any_shape(), request in any_request(), rate in 0.001_f64..10.0,
        overhead in 0.0_f64..0.5, tokens in 10.0_f64..1e6,
    ) {
        let (prompt, _, block) = request;
        let link = Link { gbit_per_second: rate, overhead_seconds: overhead };
        let speed = Speed::Rate(tokens);
        let whole = Request::new(prompt, 0, block).unwrap();
        let ranges = delta_wins(&shape, 1, &whole, &link, &speed).unwrap();
        for cached in (0..prompt).step_by(usize::try_from(block).unwrap()) {
            let delta = sizes(&shape, 1, (prompt, cached, block)).1;
            let wins = link.seconds(delta) < (prompt - cached) as f64 / tokens;
            prop_assert_eq!(ranges.iter().any(|range| range.contains(&cached)), wins);
        }
        let apart = ranges.windows(2).all(|pair| pair[0].end() + block < *pair[1].start());
        prop_assert!(apart);
    }

    #[test]
    fn at_the_equal_rate_both_take_as_long(
        bytes in 1_u64..1 << 50, seconds in 0.001_f64..1000.0, overhead in 0.0_f64..1.0,
    ) {
        match equal_gbit_per_second(bytes, seconds, overhead) {
            Some(gbit_per_second) => {
                let link = Link { gbit_per_second, overhead_seconds: overhead };
                prop_assert!((link.seconds(bytes) / seconds - 1.0).abs() < 1e-9);
            }
            None => prop_assert!(seconds <= overhead),
        }
    }
}
