// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;

use super::*;

fn heads(kv_heads: u64, dim: u64) -> Cache {
    Cache::Heads {
        kv_heads,
        key_dim: dim,
        value_dim: dim,
    }
}

fn layers(count: u64) -> Vec<Layers> {
    vec![Layers {
        count,
        window_tokens: None,
    }]
}

const DEEPSEEK: Cache = Cache::Latent {
    rank: 512,
    rope_dim: 64,
};

#[test]
fn bytes_a_token_by_hand() {
    for (cache, count, dtype, expected) in [
        // Llama 70B: 2 x 80 x 8 x 128 values.
        (heads(8, 128), 80, Dtype::Fp16, 327_680),
        (heads(8, 128), 80, Dtype::Bf16, 327_680),
        (heads(8, 128), 80, Dtype::Fp8, 163_840),
        (heads(8, 128), 80, Dtype::Fp32, 655_360),
        // 128 values: 64 bytes of data and 8 scales.
        (heads(8, 128), 80, Dtype::Nvfp4, 2 * 80 * 8 * 72),
        // Llama 8B.
        (heads(8, 128), 32, Dtype::Bf16, 131_072),
        // The tests' model: 4 KiB.
        (heads(2, 64), 4, Dtype::Fp32, 4_096),
        // DeepSeek V3: 61 x 576 values.
        (DEEPSEEK, 61, Dtype::Bf16, 70_272),
        (DEEPSEEK, 61, Dtype::Fp8, 35_136),
        (DEEPSEEK, 61, Dtype::Fp8DsMla, 61 * 656),
        (DEEPSEEK, 61, Dtype::Nvfp4DsMla, 61 * 352),
    ] {
        let shape = Shape::new(cache, layers(count), dtype).unwrap();
        assert_eq!(shape.token_bytes(1).unwrap(), expected, "{cache:?} {dtype}");
    }
}

#[test]
fn keys_and_values_may_differ_in_size() {
    let cache = Cache::Heads {
        kv_heads: 4,
        key_dim: 192,
        value_dim: 128,
    };
    let shape = Shape::new(cache, layers(1), Dtype::Bf16).unwrap();
    assert_eq!(shape.token_bytes(1).unwrap(), 4 * (192 + 128) * 2);
}

#[test]
fn tp_splits_heads_and_copies_what_it_cannot_split() {
    let llama = Shape::new(heads(8, 128), layers(80), Dtype::Fp16).unwrap();
    let deepseek = Shape::new(DEEPSEEK, layers(61), Dtype::Bf16).unwrap();
    for (shape, tp, rank, copies) in [
        (&llama, 1, 327_680, 1),
        (&llama, 2, 163_840, 1),
        (&llama, 8, 40_960, 1),
        (&llama, 16, 40_960, 2),
        (&llama, 64, 40_960, 8),
        (&deepseek, 1, 70_272, 1),
        (&deepseek, 8, 70_272, 8),
    ] {
        assert_eq!(shape.token_bytes(tp).unwrap(), rank, "{tp}");
        assert_eq!(shape.copies(tp).unwrap(), copies, "{tp}");
    }
    for tp in [3, 5, 6, 12] {
        let error = llama.token_bytes(tp).unwrap_err();
        assert_eq!(error, ModelError::UnevenHeads { kv_heads: 8, tp });
    }
    assert_eq!(llama.token_bytes(0), Err(ModelError::Zero { what: "TP" }));
}

#[test]
fn what_no_cache_can_be_is_named() {
    use ModelError::{NoLatent, NoLayers, NotPacked, NotScalable, TooLarge, Zero};
    let packed = Dtype::Fp8DsMla;
    for (cache, count, dtype, expected) in [
        (
            heads(0, 128),
            80,
            Dtype::Bf16,
            Zero {
                what: "the number of KV heads",
            },
        ),
        (
            heads(8, 0),
            80,
            Dtype::Bf16,
            Zero {
                what: "the head dimension",
            },
        ),
        (heads(8, 128), 0, Dtype::Bf16, NoLayers),
        (heads(8, 72), 80, Dtype::Nvfp4, NotScalable(72)),
        (heads(8, 128), 80, packed, NotPacked { dtype: packed }),
        (
            Cache::Latent {
                rank: 256,
                rope_dim: 64,
            },
            61,
            packed,
            NotPacked { dtype: packed },
        ),
        (
            DEEPSEEK,
            61,
            Dtype::Nvfp4,
            NoLatent {
                dtype: Dtype::Nvfp4,
            },
        ),
        (
            Cache::Latent {
                rank: 0,
                rope_dim: 64,
            },
            61,
            Dtype::Bf16,
            Zero {
                what: "the rank of the latent",
            },
        ),
        (heads(1 << 20, 1 << 20), 80, Dtype::Bf16, TooLarge),
        (heads(u64::MAX, u64::MAX), u64::MAX, Dtype::Fp32, TooLarge),
    ] {
        assert_eq!(Shape::new(cache, layers(count), dtype), Err(expected));
    }
    let window = vec![Layers {
        count: 1,
        window_tokens: Some(0),
    }];
    let error = Shape::new(heads(8, 128), window, Dtype::Bf16).unwrap_err();
    assert_eq!(error, Zero { what: "the window" });
}

#[test]
fn dtypes_by_their_names() {
    for (name, dtype) in Dtype::NAMES.iter().chain(&Dtype::OTHER_NAMES) {
        assert_eq!(name.parse(), Ok(*dtype));
        assert_eq!(name.to_uppercase().parse(), Ok(*dtype));
    }
    for (name, dtype) in Dtype::NAMES {
        assert_eq!(dtype.to_string(), name);
    }
    let error = "int3".parse::<Dtype>().unwrap_err().to_string();
    assert!(error.contains("int3"));
    for (name, _) in Dtype::NAMES {
        assert!(error.contains(name), "{error}");
    }
}

proptest! {
    #[test]
    fn ranks_together_hold_each_value_as_often_as_there_are_copies(
        kv_heads in 1_u64..64, dim in 1_u64..32, count in 1_u64..100, tp in 1_u64..256,
    ) {
        let shape = Shape::new(heads(kv_heads, 16 * dim), layers(count), Dtype::Nvfp4).unwrap();
        let one = shape.token_bytes(1).unwrap();
        match shape.token_bytes(tp) {
            Ok(rank) => {
                let copies = shape.copies(tp).unwrap();
                prop_assert_eq!(rank * tp, one * copies);
                prop_assert!(copies >= 1 && rank <= one);
            }
            Err(error) => {
                prop_assert_eq!(error, ModelError::UnevenHeads { kv_heads, tp });
                prop_assert!(kv_heads % tp != 0 && tp % kv_heads != 0);
            }
        }
    }
}
