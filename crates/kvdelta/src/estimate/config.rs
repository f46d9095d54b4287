// SPDX-License-Identifier: Apache-2.0

//! A model by its Hugging Face config.json.
//!
//! Keys and defaults as vLLM takes them (`transformers_utils/model_arch_config_convertor.py`,
//! `config/model.py`): KV heads default to the attention heads, the head dimension to hidden size
//! over heads, and of a model with parts for images the part for text counts.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use thiserror::Error;

use super::model::{Cache, Dtype, Layers};
use super::work::Attention;

/// Where the part for text stands in a model with several.
const TEXT_PARTS: [&str; 3] = ["text_config", "llm_config", "language_config"];

const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const HEADS: &[&str] = &["num_attention_heads", "n_head", "n_heads"];
const KV_HEADS: &[&str] = &[
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
];
const HIDDEN: &[&str] = &["hidden_size", "n_embd", "d_model"];
const HEAD_DIM: &[&str] = &["head_dim", "hidden_size_per_head"];
const EXPERTS: &[&str] = &["num_experts", "num_local_experts", "n_routed_experts"];
const EXPERTS_A_TOKEN: &[&str] = &["num_experts_per_tok", "num_experts_per_token"];

/// Keys of models with layers that keep a state: Mamba, linear attention, recurrences.
const STATE_KEYS: [&str; 9] = [
    "block_types",
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_period",
    "attn_layer_indices",
    "attn_type_list",
    "linear_attn_config",
    "linear_num_value_heads",
    "full_attn_idxs",
];
const STATE_PREFIXES: [&str; 3] = ["mamba_", "ssm_", "rwkv_"];
/// Such models whose configs may have none of these keys.
const STATE_MODELS: [&str; 4] = ["mamba", "mamba2", "falcon_mamba", "rwkv"];

/// Keys of models whose layers differ in their heads, share KV, compress it, or keep that of images.
const UNEVEN_KEYS: [&str; 6] = [
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
];

/// Models whose MLP has two matrices, not three.
const UNGATED: [&str; 9] = [
    "bloom",
    "falcon",
    "gpt2",
    "gpt_neox",
    "gptj",
    "mpt",
    "nemotron",
    "opt",
    "starcoder2",
];

/// A config.json that does not say what is needed, or says what is not covered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum ConfigError {
    #[error("it is no JSON object")]
    NotObject,
    #[error("it has no `{0}`")]
    Missing(&'static str),
    #[error("`{key}` is {value}, where a number above 0 should be")]
    NotCount { key: String, value: String },
    #[error(
        "`{0}` tells of layers that keep a state (Mamba, linear attention), which are not covered: \
         give the attention layers alone by --layers, --kv-heads and --head-dim"
    )]
    State(String),
    #[error(
        "`{0}` tells of layers that differ in what they keep, which are not covered: give the \
         shape by --layers, --kv-heads and --head-dim"
    )]
    Uneven(String),
    #[error("an encoder beside the decoder is not covered")]
    Encoder,
    #[error("`layer_types` has {types} entries for {layers} layers")]
    LayerTypes { types: usize, layers: u64 },
    #[error("`layer_types` has a layer of type `{0}`, which is not covered")]
    LayerType(String),
    #[error("`layer_types` has windows, and there is no `sliding_window`")]
    NoWindow,
    #[error("`hidden_size` {hidden} is no multiple of {heads} heads, and there is no `head_dim`")]
    HeadDim { hidden: u64, heads: u64 },
}

/// What a config.json says of a model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    /// The model's type, by its makers.
    pub(crate) model: Option<String>,
    pub(crate) cache: Cache,
    pub(crate) layers: Vec<Layers>,
    /// Of the weights; the cache takes it where nothing else is asked for.
    pub(crate) dtype: Option<Dtype>,
    pub(crate) attention: Attention,
    /// Parameters that each token is multiplied with; `None` where the keys do not tell.
    pub(crate) params: Option<f64>,
    /// What is left out of the count, or may be otherwise in an engine.
    pub(crate) warnings: Vec<String>,
}

impl Config {
    /// Reads the file's content.
    pub(crate) fn read(json: &Value) -> Result<Self, ConfigError> {
        let file = json.as_object().ok_or(ConfigError::NotObject)?;
        let mut parts = TEXT_PARTS.iter().filter_map(|part| file.get(*part));
        let text = parts.find_map(Value::as_object).unwrap_or(file);
        Keys { text, file }.config()
    }
}

/// The part for text, and the file around it.
struct Keys<'a> {
    text: &'a Map<String, Value>,
    file: &'a Map<String, Value>,
}

impl Keys<'_> {
    fn config(&self) -> Result<Config, ConfigError> {
        self.check_covered()?;
        let layers = self.required(LAYERS)?;
        let heads = self.required(HEADS)?;
        let (cache, attention) = self.cache(heads)?;
        let mut warnings = Vec::new();
        let layers = self.layers(layers, &mut warnings)?;
        self.warn(&mut warnings);
        Ok(Config {
            model: self.word("model_type").map(str::to_owned),
            cache,
            dtype: self.dtype(),
            attention,
            params: self.params(attention, &layers)?,
            layers,
            warnings,
        })
    }

    /// The key's value, `null` being none.
    fn value(&self, key: &str) -> Option<&Value> {
        self.text.get(key).filter(|value| !value.is_null())
    }

    fn word(&self, key: &str) -> Option<&str> {
        self.value(key).and_then(Value::as_str)
    }

    fn is(&self, key: &str) -> bool {
        self.value(key).and_then(Value::as_bool) == Some(true)
    }

    /// The first of the keys that is there.
    fn found<'a>(&'a self, keys: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        let mut found = keys.iter().filter_map(|key| Some((*key, self.value(key)?)));
        found.next()
    }

    /// A number that may be 0.
    fn number(&self, keys: &[&'static str]) -> Result<Option<u64>, ConfigError> {
        let Some((key, value)) = self.found(keys) else {
            return Ok(None);
        };
        let number = value.as_u64().filter(|number| *number <= u32::MAX.into());
        number.map(Some).ok_or_else(|| not_count(key, value))
    }

    /// A number above 0.
    fn count(&self, keys: &[&'static str]) -> Result<Option<u64>, ConfigError> {
        match (self.number(keys)?, self.found(keys)) {
            (Some(0), Some((key, value))) => Err(not_count(key, value)),
            (number, _) => Ok(number),
        }
    }

    fn required(&self, keys: &'static [&'static str]) -> Result<u64, ConfigError> {
        self.count(keys)?.ok_or(ConfigError::Missing(keys[0]))
    }

    fn layer_types(&self) -> Option<Vec<&str>> {
        let types = self.value("layer_types")?.as_array()?;
        Some(types.iter().map(|of| of.as_str().unwrap_or("?")).collect())
    }

    fn check_covered(&self) -> Result<(), ConfigError> {
        if self.is("is_encoder_decoder") {
            return Err(ConfigError::Encoder);
        }
        // A config that lists its layers is taken by the list, whatever else it could have.
        match self.layer_types() {
            Some(types) => {
                let mut state = types.iter().filter(|of| is_state(of));
                if let Some(of) = state.next() {
                    return Err(ConfigError::State(format!("{of} in layer_types")));
                }
            }
            None => {
                let mut keys = self.text.iter().filter(|(key, value)| {
                    let named = STATE_KEYS.contains(&key.as_str());
                    let prefixed = STATE_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
                    !value.is_null() && (named || prefixed)
                });
                if let Some((key, _)) = keys.next() {
                    return Err(ConfigError::State(key.clone()));
                }
                if let Some(model) = self
                    .word("model_type")
                    .filter(|of| STATE_MODELS.contains(of))
                {
                    return Err(ConfigError::State(format!("model_type {model}")));
                }
            }
        }
        let mut uneven = UNEVEN_KEYS.iter().filter(|key| self.value(key).is_some());
        if let Some(key) = uneven.next() {
            return Err(ConfigError::Uneven((*key).to_owned()));
        }
        match self.number(&["num_kv_shared_layers"])? {
            Some(1..) => Err(ConfigError::Uneven("num_kv_shared_layers".to_owned())),
            _ => Ok(()),
        }
    }

    fn cache(&self, heads: u64) -> Result<(Cache, Attention), ConfigError> {
        if let Some(rank) = self.count(&["kv_lora_rank"])? {
            let rope_dim = self.required(&["qk_rope_head_dim"])?;
            let key_dim = self.required(&["qk_nope_head_dim"])? + rope_dim;
            let value_dim = self.required(&["v_head_dim"])?;
            let attention = Attention {
                heads,
                key_dim,
                value_dim,
            };
            return Ok((Cache::Latent { rank, rope_dim }, attention));
        }
        let kv_heads = match self.is("multi_query") && !self.is("new_decoder_architecture") {
            true => 1,
            false => self.count(KV_HEADS)?.unwrap_or(heads),
        };
        let head_dim = match self.number(HEAD_DIM)? {
            Some(head_dim @ 1..) => head_dim,
            // Some configs have a 0 for none.
            _ => {
                let hidden = self.required(HIDDEN)?;
                if !hidden.is_multiple_of(heads) {
                    return Err(ConfigError::HeadDim { hidden, heads });
                }
                hidden / heads
            }
        };
        let value_dim = self.count(&["v_head_dim"])?.unwrap_or(head_dim);
        let cache = Cache::Heads {
            kv_heads,
            key_dim: head_dim,
            value_dim,
        };
        let attention = Attention {
            heads,
            key_dim: head_dim,
            value_dim,
        };
        Ok((cache, attention))
    }

    /// Layers with and without a window.
    fn layers(&self, count: u64, warnings: &mut Vec<String>) -> Result<Vec<Layers>, ConfigError> {
        let unused = self.value("use_sliding_window").and_then(Value::as_bool) == Some(false);
        // Some configs have a 0 for none.
        let window = self.number(&["sliding_window"])?;
        let window = window.filter(|window| *window > 0 && !unused);
        let windowed = match self.layer_types() {
            Some(types) => self.windowed_by_type(&types, count, warnings)?,
            None if window.is_some() => self.windowed_by_pattern(count)?,
            None => 0,
        };
        let layers = |count, window_tokens| Layers {
            count,
            window_tokens,
        };
        match (windowed, window) {
            (0, _) => Ok(vec![layers(count, None)]),
            (_, None) if unused => Ok(vec![layers(count, None)]),
            (_, None) => Err(ConfigError::NoWindow),
            (_, window) if windowed == count => Ok(vec![layers(count, window)]),
            (_, window) => Ok(vec![
                layers(count - windowed, None),
                layers(windowed, window),
            ]),
        }
    }

    fn windowed_by_type(
        &self,
        types: &[&str],
        layers: u64,
        warnings: &mut Vec<String>,
    ) -> Result<u64, ConfigError> {
        if u64::try_from(types.len()) != Ok(layers) {
            let types = types.len();
            return Err(ConfigError::LayerTypes { types, layers });
        }
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        for of in types {
            *counts.entry(of).or_default() += 1;
        }
        let mut windowed = 0;
        for (of, count) in counts {
            match of {
                "full_attention" | "attention" | "global_attention" => {}
                "sliding_attention" | "local_attention" => windowed += count,
                "chunked_attention" => warnings.push(format!(
                    "{count} layers of chunked attention are counted whole: transfers are not cut \
                     to the chunk"
                )),
                _ if of.ends_with("_sparse_attention") => warnings.push(format!(
                    "{count} layers of {of} are counted as full ones: the index's own cache is left \
                     out, and attention's work is less"
                )),
                _ => return Err(ConfigError::LayerType(of.to_owned())),
            }
        }
        Ok(windowed)
    }

    /// Where no list says which layers have a window, as transformers fills it in.
    fn windowed_by_pattern(&self, count: u64) -> Result<u64, ConfigError> {
        let default = match self.word("model_type") {
            Some("gemma2" | "gpt_oss") => Some(2),
            Some("gemma3" | "gemma3_text") => Some(6),
            Some("cohere2") => Some(4),
            _ => None,
        };
        if let Some(full_every) = self.count(&["sliding_window_pattern"])?.or(default) {
            return Ok(count - count / full_every);
        }
        let first = self.number(&["max_window_layers"])?.unwrap_or(0);
        Ok(count.saturating_sub(first))
    }

    fn dtype(&self) -> Option<Dtype> {
        let keys = ["dtype", "torch_dtype"];
        let mut words = [self.text, self.file]
            .into_iter()
            .flat_map(|part| keys.iter().filter_map(|key| part.get(*key)));
        words.find_map(Value::as_str)?.parse().ok()
    }

    fn warn(&self, warnings: &mut Vec<String>) {
        let kv_scheme = [self.text, self.file].into_iter().find_map(|part| {
            let quantization = part.get("quantization_config")?;
            let mut keys = ["kv_cache_scheme", "kv_cache_quant_algo"].into_iter();
            keys.find(|key| quantization.get(*key).is_some_and(|of| !of.is_null()))
        });
        if let Some(key) = kv_scheme {
            warnings.push(format!(
                "`{key}` says that KV is quantized: give its --dtype"
            ));
        }
        if self.value("index_head_dim").is_some() && self.layer_types().is_none() {
            warnings.push(
                "`index_head_dim` tells of a sparse attention: the index's own cache is left out, \
                 and attention's work is less"
                    .to_owned(),
            );
        }
        if self.word("model_type") == Some("minicpm3") {
            warnings.push(
                "vLLM does not store minicpm3 as a latent but by head: give it the shape"
                    .to_owned(),
            );
        }
        if matches!(self.number(&["num_nextn_predict_layers"]), Ok(Some(1..))) {
            warnings.push("the layers of `num_nextn_predict_layers` are left out".to_owned());
        }
    }

    /// Parameters of the matrices that a token meets, without embedding and output head (prefill
    /// needs the head for one token only).
    fn params(&self, attention: Attention, layers: &[Layers]) -> Result<Option<f64>, ConfigError> {
        let (Some(hidden), Some(width)) = (
            self.count(HIDDEN)?,
            self.count(&["intermediate_size", "ffn_hidden_size", "n_inner"])?,
        ) else {
            return Ok(None);
        };
        let layers: u64 = layers.iter().map(|of| of.count).sum();
        let matrices = match self.word("model_type") {
            Some(model) if UNGATED.contains(&model) => 2.0,
            _ => 3.0,
        };
        let hidden = hidden as f64;
        let dense = matrices * hidden * width as f64;
        let mlp = match self.count(EXPERTS)? {
            None => dense * layers as f64,
            Some(experts) => {
                let Some(expert) = self.experts(hidden, width, matrices)? else {
                    return Ok(None);
                };
                let first = self.number(&["first_k_dense_replace"])?.unwrap_or(0);
                let first = first.min(layers);
                let router = hidden * experts as f64;
                dense * first as f64 + (expert + router) * (layers - first) as f64
            }
        };
        let attention = self.attention_params(hidden, attention)?;
        Ok(Some(mlp + attention * layers as f64))
    }

    /// Parameters of the experts that a token meets in a layer; `None`: not every layer has them,
    /// or it is not known how many meet.
    fn experts(&self, hidden: f64, width: u64, matrices: f64) -> Result<Option<f64>, ConfigError> {
        let every = [
            "moe_layer_freq",
            "decoder_sparse_step",
            "interleave_moe_layer_step",
        ];
        let is_every = |key: &str| match self.value(key) {
            None => true,
            Some(value) => value.as_u64() == Some(1),
        };
        let some_dense = self
            .value("mlp_only_layers")
            .and_then(Value::as_array)
            .is_some_and(|dense| !dense.is_empty());
        if !every.into_iter().all(is_every)
            || some_dense
            || self.value("intermediate_size_mlp").is_some()
        {
            return Ok(None);
        }
        let Some(met) = self.count(EXPERTS_A_TOKEN)? else {
            return Ok(None);
        };
        let width = self.count(&["moe_intermediate_size"])?.unwrap_or(width);
        let shared = self.number(&["n_shared_experts"])?.unwrap_or(0);
        let shared_width = self
            .number(&["shared_expert_intermediate_size"])?
            .unwrap_or(0);
        let width = (met + shared) as f64 * width as f64 + shared_width as f64;
        Ok(Some(matrices * hidden * width))
    }

    /// Parameters of a layer's attention.
    fn attention_params(&self, hidden: f64, attention: Attention) -> Result<f64, ConfigError> {
        let heads = attention.heads as f64;
        let (key_dim, value_dim) = (attention.key_dim as f64, attention.value_dim as f64);
        let out = heads * value_dim * hidden;
        let query = match self.count(&["q_lora_rank"])? {
            Some(rank) => rank as f64 * (hidden + heads * key_dim),
            None => hidden * heads * key_dim,
        };
        let key_value = match self.cache(attention.heads)?.0 {
            Cache::Heads { kv_heads, .. } => hidden * kv_heads as f64 * (key_dim + value_dim),
            Cache::Latent { rank, rope_dim } => {
                let (rank, rope_dim) = (rank as f64, rope_dim as f64);
                let unpacked = heads * (key_dim - rope_dim + value_dim);
                hidden * (rank + rope_dim) + rank * unpacked
            }
        };
        Ok(query + key_value + out)
    }
}

/// Whether a layer of that type keeps a state and no KV of tokens.
fn is_state(layer_type: &str) -> bool {
    let words = ["linear", "mamba", "recurrent", "conv", "lightning", "ssm"];
    words.iter().any(|word| layer_type.contains(word))
}

fn not_count(key: &str, value: &Value) -> ConfigError {
    // Long lists are not shown whole.
    let value: String = value.to_string().chars().take(40).collect();
    ConfigError::NotCount {
        key: key.to_owned(),
        value,
    }
}

#[cfg(test)]
mod tests;
