// SPDX-License-Identifier: Apache-2.0

//! `kvdelta estimate`: what a delta saves of one request, by formula.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgGroup, Args};
use serde::Serialize;
use serde_json::Value;

use crate::estimate::config::Config;
use crate::estimate::device::{Device, Precision};
use crate::estimate::model::{Cache, Dtype, Layers, Shape};
use crate::estimate::report::{Compute, Layout, Question, Report};
use crate::estimate::rfc::{self, Rfc};
use crate::estimate::table;
use crate::estimate::transfer::{Link, MAX_BLOCK_TOKENS, MAX_PROMPT_TOKENS, Request};
use crate::estimate::work::{Attention, Speed, Work};
use crate::render::{print, say};
use crate::unit::digits;

/// What prefill reaches of a device's peak where nothing else is said; an assumption. Pope et al.
/// ("Efficiently Scaling Transformer Inference") measured 0.76 with large batches.
const UTILISATION: &str = "0.5";

/// Options of `kvdelta estimate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("asked").args(["prompt", "rfc"]).required(true))]
#[command(after_help = "Examples:
  kvdelta estimate --config config.json --prompt 131072 --cached 114688 --tp 8 --link 100,400 --device h100
  kvdelta estimate --layers 80 --kv-heads 8 --head-dim 128 --dtype fp8 --prompt 8192 --cached 6144
  kvdelta estimate --layers 61 --kv-lora-rank 512 --qk-rope-head-dim 64 --dp 8 --prompt 32768 --cached 28672
  kvdelta estimate --config config.json --prompt 8192 --cached 6144 --compute-rate 12000 --json
  kvdelta estimate --rfc                           the figures of the RFC and of others, checked

Of what D holds whole blocks count, and never the last token, which a D always computes. Transfer and
recompute are compared from where P has the prompt: P's own prefill is in neither.

Exit codes: 0 done, 2 bad usage, a model or layout that is not covered, or a file that cannot be read.")]
pub(crate) struct Options {
    /// Take the model from this Hugging Face config.json.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["layers", "kv_heads", "head_dim", "heads", "kv_lora_rank",
          "qk_rope_head_dim", "window_layers", "window"])]
    config: Option<PathBuf>,

    /// Attention layers.
    #[arg(long, value_name = "N", value_parser = count())]
    layers: Option<u64>,

    /// KV heads of a layer.
    #[arg(long, value_name = "N", value_parser = count(), requires = "layers")]
    kv_heads: Option<u64>,

    /// Values of a key and of a value of one head.
    #[arg(long, value_name = "N", value_parser = count(), requires = "kv_heads")]
    head_dim: Option<u64>,

    /// Query heads of a layer, for the work of attention.
    #[arg(long, value_name = "N", value_parser = count(), requires = "head_dim")]
    heads: Option<u64>,

    /// Rank of an MLA latent, in place of heads.
    #[arg(long, value_name = "N", value_parser = count(), requires = "layers",
          conflicts_with_all = ["kv_heads", "head_dim", "heads"])]
    kv_lora_rank: Option<u64>,

    /// Rotary values beside an MLA latent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=MAX_COUNT),
          requires = "kv_lora_rank", conflicts_with_all = ["kv_heads", "head_dim", "heads"])]
    qk_rope_head_dim: Option<u64>,

    /// So many of the layers keep only --window tokens.
    #[arg(long, value_name = "N", value_parser = count(), requires_all = ["layers", "window"])]
    window_layers: Option<u64>,

    /// The window of --window-layers, in tokens.
    #[arg(long, value_name = "TOKENS", value_parser = count(), requires = "window_layers")]
    window: Option<u64>,

    /// How KV is stored: bf16, fp16, fp32, fp8, nvfp4, fp8_ds_mla or nvfp4_ds_mla [default: the
    /// config's, else bf16].
    #[arg(long)]
    dtype: Option<Dtype>,

    /// Tensor parallelism of P and D.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count())]
    tp: u64,

    /// Tensor parallelism of P, where it is another.
    #[arg(long, value_name = "N", value_parser = count())]
    prefill_tp: Option<u64>,

    /// DP ranks of a worker, each of that TP; a request is on one of them.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count())]
    dp: u64,

    /// Tokens of the prompt.
    #[arg(long, value_name = "TOKENS",
          value_parser = clap::value_parser!(u64).range(1..=MAX_PROMPT_TOKENS))]
    prompt: Option<u64>,

    /// Tokens of it that D holds, from its start.
    #[arg(long, value_name = "TOKENS", default_value = "0")]
    cached: u64,

    /// Tokens in a block.
    #[arg(long, value_name = "TOKENS", default_value = "16",
          value_parser = clap::value_parser!(u64).range(1..=MAX_BLOCK_TOKENS))]
    block_size: u64,

    /// What a transfer gets of the link, over all ranks, in Gbit/s; several with commas.
    #[arg(long, value_name = "GBITS", default_value = "100", value_delimiter = ',',
          value_parser = above_zero)]
    link: Vec<f64>,

    /// What each transfer takes beside its bytes.
    #[arg(long, value_name = "MS", default_value = "0",
          value_parser = not_negative)]
    overhead_ms: f64,

    /// Compute on these, by their peaks: a100, l40s, h20, h100, h200, b200 or mi300x.
    #[arg(long, value_name = "NAME", conflicts_with = "compute_rate")]
    device: Option<String>,

    /// Devices of a D [default: --tp].
    #[arg(long, value_name = "N", value_parser = count(), requires = "device", conflicts_with = "compute_rate")]
    devices: Option<u64>,

    /// What the devices compute in: bf16 or fp8.
    #[arg(
        long,
        default_value = "bf16",
        requires = "device",
        conflicts_with = "compute_rate"
    )]
    precision: Precision,

    /// Share of the peak that is reached: an assumption, best replaced by --compute-rate.
    #[arg(long, value_name = "SHARE", default_value = UTILISATION, value_parser = share,
          requires = "device", conflicts_with = "compute_rate")]
    utilisation: f64,

    /// Parameters that a token is multiplied with, of experts those that it meets, such as 70e9
    /// [default: by the config].
    #[arg(long, value_name = "N", value_parser = above_zero, requires = "device", conflicts_with = "compute_rate")]
    params: Option<f64>,

    /// Tokens a second that D computes, as measured.
    #[arg(long, value_name = "TOKENS", value_parser = above_zero)]
    compute_rate: Option<f64>,

    /// Print the RFC's tables and figures of others, and what agrees with the formulas.
    #[arg(long, conflicts_with_all = ["config", "layers", "kv_heads", "head_dim", "heads", "kv_lora_rank",
          "qk_rope_head_dim", "window_layers", "window", "dtype", "tp", "prefill_tp", "dp", "prompt", "cached",
          "block_size", "link", "overhead_ms", "device", "devices", "precision", "utilisation", "params",
          "compute_rate"])]
    rfc: bool,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Largest count that an option takes.
const MAX_COUNT: u64 = 1 << 20;

fn count() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=MAX_COUNT)
}

fn number(text: &str) -> Result<f64, String> {
    let number: Result<f64, _> = text.trim().parse();
    match number {
        Ok(number) if number.is_finite() => Ok(number),
        _ => Err("it is no finite number".to_owned()),
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    match number(text)? {
        number if number > 0.0 => Ok(number),
        _ => Err("it must be above 0".to_owned()),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match number(text)? {
        number if number >= 0.0 => Ok(number),
        _ => Err("it must not be negative".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match above_zero(text)? {
        share if share <= 1.0 => Ok(share),
        _ => Err("it must not be above 1".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(options: &Options) -> ExitCode {
    let shown = answer(options)
        .and_then(|text| print(&text).context("cannot write the report to standard output"));
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::from(2)
        }
    }
}

fn answer(options: &Options) -> Result<String> {
    if options.rfc {
        let rfc = Rfc::new()?;
        return if options.json {
            json(&rfc)
        } else {
            Ok(rfc::text(&rfc))
        };
    }
    let report = Report::new(question(options)?)?;
    if options.json {
        json(&report)
    } else {
        Ok(table::text(&report))
    }
}

fn json(report: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

/// A model, by its config or by options.
struct Model {
    name: String,
    cache: Cache,
    layers: Vec<Layers>,
    dtype: Option<Dtype>,
    attention: Option<Attention>,
    params: Option<f64>,
    warnings: Vec<String>,
}

impl Model {
    fn new(options: &Options) -> Result<Self> {
        match &options.config {
            Some(path) => Self::of_config(path),
            None => Self::of_options(options),
        }
    }

    fn of_config(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
        let json: Value = serde_json::from_str(&text)
            .with_context(|| format!("{shown} is no JSON (nor are Infinity and NaN)"))?;
        let config = Config::read(&json).with_context(|| format!("{shown}"))?;
        Ok(Self {
            name: config.model.unwrap_or_else(|| "by its config".to_owned()),
            cache: config.cache,
            layers: config.layers,
            dtype: config.dtype,
            attention: Some(config.attention),
            params: config.params,
            warnings: config.warnings,
        })
    }

    fn of_options(options: &Options) -> Result<Self> {
        let cache = match (options.kv_heads, options.head_dim, options.kv_lora_rank) {
            (Some(kv_heads), Some(head_dim), None) => Cache::Heads {
                kv_heads,
                key_dim: head_dim,
                value_dim: head_dim,
            },
            (None, None, Some(rank)) => Cache::Latent {
                rank,
                rope_dim: options.qk_rope_head_dim.ok_or_else(|| {
                    anyhow!("--kv-lora-rank takes --qk-rope-head-dim (0 for none)")
                })?,
            },
            (Some(_), None, _) => bail!("--kv-heads takes --head-dim"),
            _ => bail!(
                "give a model: --config FILE, or --layers with --kv-heads and --head-dim, or with \
                 --kv-lora-rank and --qk-rope-head-dim"
            ),
        };
        let layers = options.layers.unwrap_or(0);
        let windowed = options.window_layers.unwrap_or(0);
        if windowed > layers {
            bail!("{windowed} layers with a window are more than the {layers} layers");
        }
        let layers = [(layers - windowed, None), (windowed, options.window)];
        let layers = layers.map(|(count, window_tokens)| Layers {
            count,
            window_tokens,
        });
        Ok(Self {
            name: "by its shape".to_owned(),
            cache,
            layers: layers.to_vec(),
            dtype: None,
            attention: options
                .heads
                .zip(options.head_dim)
                .map(|(heads, dim)| Attention {
                    heads,
                    key_dim: dim,
                    value_dim: dim,
                }),
            params: None,
            warnings: Vec::new(),
        })
    }
}

fn question(options: &Options) -> Result<Question> {
    let prompt = options.prompt.context("give the --prompt")?;
    let request = Request::new(prompt, options.cached, options.block_size)?;
    let mut model = Model::new(options)?;
    let layout = Layout {
        prefill_tp: options.prefill_tp.unwrap_or(options.tp),
        decode_tp: options.tp,
        dp: options.dp,
    };
    let dtype = options.dtype.or(model.dtype).unwrap_or(Dtype::Bf16);
    let shape = Shape::new(model.cache, std::mem::take(&mut model.layers), dtype)?;
    let splits = [
        ("--tp", Some(options.tp)),
        ("--prefill-tp", options.prefill_tp),
    ];
    for (option, tp) in splits {
        if let Some(tp) = tp {
            check_split(&shape, model.attention, tp).with_context(|| format!("{option} {tp}"))?;
        }
    }
    if shape.layers().iter().any(|of| of.window_tokens.is_some()) {
        model.warnings.push(
            "the router makes no claims about models with windows today: P holds all of it"
                .to_owned(),
        );
    }
    let overhead_seconds = options.overhead_ms / 1000.0;
    Ok(Question {
        compute: compute(options, &mut model, &shape)?,
        model: model.name,
        shape,
        layout,
        request,
        cached_tokens: options.cached,
        links: options
            .link
            .iter()
            .map(|&gbit_per_second| Link {
                gbit_per_second,
                overhead_seconds,
            })
            .collect(),
        warnings: model.warnings,
    })
}

/// Whether the heads can be split over `tp` ranks.
fn check_split(shape: &Shape, attention: Option<Attention>, tp: u64) -> Result<()> {
    if let Some(Attention { heads, .. }) = attention
        && !heads.is_multiple_of(tp)
    {
        bail!("{heads} attention heads cannot be split over TP {tp}");
    }
    shape.token_bytes(tp)?;
    Ok(())
}

/// `None`: not asked for.
fn compute(options: &Options, model: &mut Model, shape: &Shape) -> Result<Option<Compute>> {
    if let Some(rate) = options.compute_rate {
        return Ok(Some(Compute {
            speed: Speed::Rate(rate),
            by: format!("{} tokens a second, as given", digits(rate)),
            source: None,
        }));
    }
    let Some(name) = &options.device else {
        return Ok(None);
    };
    let device = Device::named(name)?;
    let params = options.params.or(model.params).context(
        "the number of parameters is not known: give the --params that a token meets, or a \
         measured --compute-rate",
    )?;
    if model.attention.is_none() {
        model.warnings.push(
            "attention's own work is left out, much of that of long prompts: --config or --heads tells"
                .to_owned(),
        );
    }
    let work = Work {
        params,
        attention: model.attention,
        layers: shape.layers().to_vec(),
    };
    let count = options.devices.unwrap_or(options.tp);
    let (precision, utilisation) = (options.precision, options.utilisation);
    let speed = Speed::of_device(work, device, precision, count, utilisation)?;
    let by = format!(
        "{count} {} at {utilisation} of the {precision} peak, {:.1}e9 parameters a token",
        device.name,
        params / 1e9
    );
    Ok(Some(Compute {
        speed,
        by,
        source: Some(device.source),
    }))
}
