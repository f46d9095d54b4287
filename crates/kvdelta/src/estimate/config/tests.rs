// SPDX-License-Identifier: Apache-2.0

use serde_json::json;

use super::*;

fn llama_70b() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16", "vocab_size": 128256,
    })
}

fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    })
}

fn gpt_oss_20b() -> Value {
    let types: Vec<_> = (0..24)
        .map(|layer| ["sliding_attention", "full_attention"][layer % 2])
        .collect();
    json!({
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": types,
    })
}

/// `of` with these keys set.
fn with(mut of: Value, keys: Value) -> Value {
    let Value::Object(keys) = keys else {
        panic!("no object")
    };
    of.as_object_mut().unwrap().extend(keys);
    of
}

fn without(mut of: Value, key: &str) -> Value {
    of.as_object_mut().unwrap().remove(key).unwrap();
    of
}

fn read(json: &Value) -> Config {
    Config::read(json).unwrap()
}

/// Layers without and with a window.
fn windowed(config: &Config) -> (u64, u64, Option<u64>) {
    let of = |is: bool| {
        let of = config.layers.iter();
        of.filter(move |layers| layers.window_tokens.is_some() == is)
    };
    let window = of(true).find_map(|layers| layers.window_tokens);
    let count = |is| of(is).map(|layers| layers.count).sum();
    (count(false), count(true), window)
}

#[test]
fn llama_is_read_and_its_parameters_counted() {
    let config = read(&llama_70b());
    let cache = Cache::Heads {
        kv_heads: 8,
        key_dim: 128,
        value_dim: 128,
    };
    assert_eq!(config.cache, cache);
    assert_eq!(windowed(&config), (80, 0, None));
    assert_eq!(config.dtype, Some(Dtype::Bf16));
    assert_eq!(config.attention.heads, 64);
    // 80 x (2 x 8192 x 8192 + 2 x 8192 x 1024 + 3 x 8192 x 28672).
    assert_eq!(config.params, Some(68_451_041_280.0));
    assert_eq!(config.model.as_deref(), Some("llama"));
    assert!(config.warnings.is_empty());
}

#[test]
fn deepseek_is_a_latent_and_few_of_its_experts_are_met() {
    let config = read(&deepseek_v3());
    let cache = Cache::Latent {
        rank: 512,
        rope_dim: 64,
    };
    assert_eq!(config.cache, cache);
    assert_eq!(
        (config.attention.key_dim, config.attention.value_dim),
        (192, 128)
    );
    // 61 x 187,105,280 of attention, 3 x 396,361,728, 58 x (9 x 44,040,192 + 1,835,008).
    assert_eq!(config.params, Some(35_697_917_952.0));
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].contains("num_nextn_predict_layers"));
}

#[test]
fn layers_with_a_window_by_their_list() {
    let config = read(&gpt_oss_20b());
    assert_eq!(windowed(&config), (12, 12, Some(128)));
    // 24 x (26,542,080 + 4 x 24,883,200 + 92,160).
    assert_eq!(config.params, Some(3_028_008_960.0));
    assert_eq!(config.dtype, None);
}

#[test]
fn layers_with_a_window_where_there_is_no_list() {
    let window = |keys| windowed(&read(&with(llama_70b(), keys)));
    let four = json!({"sliding_window": 4096});
    for (keys, expected) in [
        (json!({}), (80, 0, None)),
        (json!({"sliding_window": null}), (80, 0, None)),
        (json!({"sliding_window": 0}), (80, 0, None)),
        (four.clone(), (0, 80, Some(4096))),
        (
            with(four.clone(), json!({"use_sliding_window": false})),
            (80, 0, None),
        ),
        (
            with(
                four.clone(),
                json!({"use_sliding_window": true, "max_window_layers": 70}),
            ),
            (70, 10, Some(4096)),
        ),
        (
            with(four.clone(), json!({"model_type": "gemma2"})),
            (40, 40, Some(4096)),
        ),
        (
            with(four.clone(), json!({"model_type": "gemma3_text"})),
            (13, 67, Some(4096)),
        ),
        (
            with(four.clone(), json!({"model_type": "cohere2"})),
            (20, 60, Some(4096)),
        ),
        (
            with(four, json!({"sliding_window_pattern": 8})),
            (10, 70, Some(4096)),
        ),
    ] {
        assert_eq!(window(keys.clone()), expected, "{keys}");
    }
}

#[test]
fn of_a_model_with_images_the_part_for_text_counts() {
    let text = llama_70b();
    let whole = json!({"model_type": "some_vl", "text_config": text, "vision_config": {}, "dtype": "float16"});
    assert_eq!(read(&whole), read(&llama_70b()));
    let whole = with(
        whole,
        json!({"text_config": without(llama_70b(), "torch_dtype")}),
    );
    assert_eq!(read(&whole).dtype, Some(Dtype::Fp16));
}

#[test]
fn defaults_of_heads() {
    let config = read(&without(llama_70b(), "num_key_value_heads"));
    assert!(matches!(
        config.cache,
        Cache::Heads {
            kv_heads: 64,
            key_dim: 128,
            ..
        }
    ));
    let config = read(&with(llama_70b(), json!({"head_dim": 96})));
    assert!(matches!(
        config.cache,
        Cache::Heads {
            kv_heads: 8,
            key_dim: 96,
            value_dim: 96
        }
    ));
    let one = |keys| {
        let config = read(&with(without(llama_70b(), "num_key_value_heads"), keys));
        matches!(config.cache, Cache::Heads { kv_heads: 1, .. })
    };
    assert!(one(json!({"multi_query": true})));
    assert!(!one(json!({"multi_query": false})));
    assert!(!one(
        json!({"multi_query": true, "new_decoder_architecture": true})
    ));
    let gpt2 = json!({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768});
    let config = read(&gpt2);
    assert!(matches!(
        config.cache,
        Cache::Heads {
            kv_heads: 12,
            key_dim: 64,
            ..
        }
    ));
    assert_eq!(config.params, None);
}

#[test]
fn parameters_that_the_keys_do_not_tell() {
    let moe = json!({"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024});
    let moe = with(llama_70b(), moe);
    assert!(read(&moe).params.is_some());
    for keys in [
        json!({"decoder_sparse_step": 2}),
        json!({"mlp_only_layers": [0]}),
        json!({"num_experts_per_tok": null}),
        json!({"intermediate_size": null}),
        json!({"intermediate_size_mlp": 16384}),
    ] {
        assert_eq!(
            read(&with(moe.clone(), keys.clone())).params,
            None,
            "{keys}"
        );
    }
}

#[test]
fn what_is_left_out_is_told() {
    for (keys, word) in [
        (json!({"index_head_dim": 128}), "index_head_dim"),
        (
            json!({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}),
            "kv_cache_scheme",
        ),
        (
            json!({"layer_types": ["chunked_attention"], "num_hidden_layers": 1}),
            "chunked",
        ),
        (
            json!({"layer_types": ["deepseek_sparse_attention"], "num_hidden_layers": 1}),
            "sparse_attention",
        ),
    ] {
        let config = read(&with(llama_70b(), keys));
        assert_eq!(config.warnings.len(), 1, "{word}");
        assert!(config.warnings[0].contains(word), "{:?}", config.warnings);
    }
}

#[test]
fn what_is_not_covered_or_wrong_is_named() {
    let hybrid: Vec<_> = (0..80)
        .map(|layer| ["linear_attention", "full_attention"][usize::from(layer % 4 == 3)])
        .collect();
    for (keys, words) in [
        (
            json!({"layer_types": hybrid}),
            "`linear_attention in layer_types` tells of layers that keep a state",
        ),
        (
            json!({"mamba_d_state": 16}),
            "`mamba_d_state` tells of layers that keep a state",
        ),
        (
            json!({"hybrid_override_pattern": "M-M*"}),
            "`hybrid_override_pattern`",
        ),
        (json!({"attn_layer_period": 8}), "`attn_layer_period`"),
        (json!({"model_type": "rwkv"}), "`model_type rwkv`"),
        (
            json!({"num_kv_shared_layers": 20}),
            "`num_kv_shared_layers` tells of layers that differ in what they keep",
        ),
        (json!({"compress_ratios": [4, 128]}), "`compress_ratios`"),
        (
            json!({"per_layer_config": {"05": {"head_dim": 512}}}),
            "`per_layer_config`",
        ),
        (
            json!({"cross_attention_layers": [3]}),
            "`cross_attention_layers`",
        ),
        (
            json!({"block_types": ["recurrent", "attention"]}),
            "`block_types`",
        ),
        (json!({"is_encoder_decoder": true}), "an encoder"),
        (json!({"num_hidden_layers": 0}), "`num_hidden_layers` is 0"),
        (
            json!({"num_attention_heads": 0}),
            "`num_attention_heads` is 0",
        ),
        (
            json!({"num_key_value_heads": 0}),
            "`num_key_value_heads` is 0",
        ),
        (
            json!({"num_key_value_heads": [8, 4]}),
            "`num_key_value_heads` is [8,4]",
        ),
        (
            json!({"num_hidden_layers": -1}),
            "`num_hidden_layers` is -1",
        ),
        (
            json!({"num_hidden_layers": 1.5}),
            "`num_hidden_layers` is 1.5",
        ),
        (
            json!({"num_hidden_layers": u64::MAX}),
            "`num_hidden_layers` is 18446744073709551615",
        ),
        (
            json!({"num_hidden_layers": null}),
            "it has no `num_hidden_layers`",
        ),
        (
            json!({"num_attention_heads": null}),
            "it has no `num_attention_heads`",
        ),
        (json!({"hidden_size": null}), "it has no `hidden_size`"),
        (
            json!({"num_attention_heads": 63}),
            "8192 is no multiple of 63 heads",
        ),
        (json!({"kv_lora_rank": 512}), "it has no `qk_rope_head_dim`"),
        (
            json!({"layer_types": ["full_attention"]}),
            "1 entries for 80 layers",
        ),
        (
            json!({"layer_types": ["moon_attention"], "num_hidden_layers": 1}),
            "type `moon_attention`",
        ),
        (
            json!({"layer_types": ["sliding_attention"], "num_hidden_layers": 1}),
            "there is no `sliding_window`",
        ),
    ] {
        let error = Config::read(&with(llama_70b(), keys))
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
    for json in [json!([]), json!(null), json!("a")] {
        assert_eq!(Config::read(&json), Err(ConfigError::NotObject));
    }
}

#[test]
fn attention_layers_alone_are_taken_whatever_else_the_model_could_have() {
    let types = vec!["attention"; 80];
    let config = read(&with(
        llama_70b(),
        json!({"layer_types": types, "mamba_d_state": 128}),
    ));
    assert_eq!(windowed(&config), (80, 0, None));
}
