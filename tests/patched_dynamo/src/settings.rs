// SPDX-License-Identifier: Apache-2.0

//! The router's settings of one run, and the model that it serves.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use dynamo_kv_router::KvRouterConfig;
use dynamo_kv_router::config::try_kv_router_config_from_dynamo_env;
use dynamo_kv_router::plugins::RouterPluginRegistry;
use dynamo_llm::kv_router::plugins::install_router_plugin_registry;
use serde_json::json;

/// Ids that the model's tokenizer knows: as many as its vocabulary.
pub const VOCABULARY: u32 = 4096;

/// What all recorded streams start from.
#[derive(Debug)]
pub struct Settings {
    config: KvRouterConfig,
}

impl Settings {
    /// Dynamo's variables, then the weight and the policy file.
    pub fn new(weight: Option<f64>, policy: Option<&Path>) -> Result<Self> {
        let mut config =
            try_kv_router_config_from_dynamo_env().map_err(|error| anyhow!("{error}"))?;
        config.router_policy_config = policy.map(|path| path.display().to_string());
        set_weight(&mut config, weight)?;
        Ok(Self { config })
    }

    /// The router's configuration, to be changed for one stream.
    pub fn config(&self) -> KvRouterConfig {
        self.config.clone()
    }

    /// Dynamo's policies, as its frontends link them.
    pub fn policies() -> Result<RouterPluginRegistry> {
        let mut registry = dynamo_custom_policy_builtin::default_registry();
        dynamo_custom_policy_builtin::register(&mut registry)?;
        Ok(registry)
    }

    /// Installs the policies for the whole program.
    pub fn install_policies(&self) -> Result<()> {
        ensure!(
            install_router_plugin_registry(Self::policies()?),
            "policies were installed already"
        );
        Ok(())
    }
}

/// Sets the weight of the prefix that a decode worker holds already.
pub fn set_weight(
    #[cfg_attr(not(kvdelta_patched), expect(unused_variables))] config: &mut KvRouterConfig,
    weight: Option<f64>,
) -> Result<()> {
    let Some(weight) = weight else {
        return Ok(());
    };
    #[cfg(kvdelta_patched)]
    {
        config.decode_overlap_score_weight = weight.into();
        Ok(())
    }
    #[cfg(not(kvdelta_patched))]
    anyhow::bail!("--weight {weight}: this build has no such field, being of unpatched crates")
}

/// Writes a model without weights whose tokens are words, unless it is there; its whole path.
pub fn write_model(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        return Ok(folder.canonicalize()?);
    }
    let parent = folder
        .parent()
        .filter(|parent| *parent != Path::new(""))
        .unwrap_or(Path::new("."));
    // Complete or not there: several recorders may start at once.
    let scratch = tempfile::tempdir_in(parent)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let vocabulary: serde_json::Map<_, _> = (0..VOCABULARY)
        .map(|id| (format!("w{id}"), id.into()))
        .collect();
    let files = [
        (
            "config.json",
            json!({
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "max_position_embeddings": 65536,
                "vocab_size": VOCABULARY,
                "hidden_size": 8,
                "num_attention_heads": 1,
                "num_hidden_layers": 1,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }),
        ),
        (
            "generation_config.json",
            json!({ "bos_token_id": 1, "eos_token_id": 2 }),
        ),
        (
            "tokenizer_config.json",
            json!({
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "w1",
                "eos_token": "w2",
                "model_max_length": 65536,
                "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
            }),
        ),
        (
            "tokenizer.json",
            json!({
                "version": "1.0",
                "truncation": null,
                "padding": null,
                "added_tokens": [],
                "normalizer": null,
                "pre_tokenizer": { "type": "Whitespace" },
                "post_processor": null,
                "decoder": null,
                "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "w0" },
            }),
        ),
    ];
    for (name, content) in files {
        let path = scratch.path().join(name);
        fs::write(&path, content.to_string())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let made = fs::rename(scratch.path(), folder);
    if !folder.exists() {
        made.with_context(|| format!("cannot make {}", folder.display()))?;
    }
    Ok(folder.canonicalize()?)
}
