// SPDX-License-Identifier: Apache-2.0

//! Figures that were published, beside what the formulas give.
//!
//! The RFC is "Prefix-Aware Delta KV Cache Transfer for Disaggregated Prefill/Decode Serving",
//! Dynamo's discussion 7861. Of its tables the token counts, two times and the expected gains are
//! known here, and that its bytes are half of those that others give for models of that shape.

use std::fmt::Write as _;

use anyhow::Result;
use serde::Serialize;

use super::device::{Device, Precision};
use super::model::{Cache, Dtype, Layers, ModelError, Shape};
use super::transfer::{Link, Request, Sizes};
use super::work::{Attention, Speed, Work};
use crate::render::Side::{Left, Right};
use crate::render::Table;
use crate::unit::{binary_bytes, bytes, count, percent, seconds};

/// Version of the JSON's keys.
const VERSION: u32 = 1;

/// Llama 70B, as the RFC has it.
const LAYERS: u64 = 80;
const HEADS: u64 = 64;
const KV_HEADS: u64 = 8;
const HEAD_DIM: u64 = 128;
/// Of its matrices: hidden size 8,192, MLP of 28,672.
const PARAMS: f64 = 68_451_041_280.0;
/// vLLM's default; every count of cached tokens below is a multiple.
const BLOCK_TOKENS: u64 = 16;
/// The RFC's link.
const LINK: Link = Link {
    gbit_per_second: 100.0,
    overhead_seconds: 0.0,
};
/// What computes, for the gains of TTFT; the RFC does not say what it had in mind.
const DEVICE: &str = "h100";
const DEVICES: u64 = 8;
const UTILISATION: f64 = 0.5;

const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1_073_741_824.0;

/// The RFC's rows: a prompt, and what D holds of it.
const SCALE: [(u64, u64); 4] = [
    (4_096, 3_072),
    (8_192, 6_144),
    (32_768, 28_672),
    (131_072, 114_688),
];

/// The RFC's expected gains, in percent: traffic, TTFT, bandwidth.
const GAINS: [(&str, Interval, Interval); 4] = [
    ("shared prompts", (20.0, 40.0), (50.0, 75.0)),
    ("dialogue", (30.0, 50.0), (60.0, 80.0)),
    ("RAG", (50.0, 70.0), (75.0, 90.0)),
    ("long context", (60.0, 80.0), (80.0, 90.0)),
];

type Interval = (f64, f64);

/// What a figure is, beside the formula's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Agrees,
    /// It does where its GB are 2^30 bytes (its MB 2^20).
    AgreesInBinary,
    /// A part of the formula's interval is in the figure's.
    Overlaps,
    Differs,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::AgreesInBinary => "agrees, in 2^30",
            Self::Overlaps => "overlaps",
            Self::Differs => "DIFFERS",
        }
    }
}

/// One published figure.
#[derive(Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) figure: String,
    pub(crate) said: String,
    pub(crate) formula: String,
    pub(crate) verdict: Verdict,
    pub(crate) remark: String,
}

/// A row of the RFC's table of scale, by formula.
#[derive(Debug, Serialize)]
pub(crate) struct ScaleRow {
    prompt_tokens: u64,
    cached_tokens: u64,
    saved_share: f64,
    full_bytes: u64,
    delta_bytes: u64,
    full_seconds: f64,
    delta_seconds: f64,
    /// The same with half of the bytes a token, as the RFC's table has them.
    half_full_bytes: u64,
    half_delta_bytes: u64,
    half_full_seconds: f64,
    half_delta_seconds: f64,
}

/// All of it, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Rfc {
    version: u32,
    tolerance: &'static str,
    model: String,
    pub(crate) scale: Vec<ScaleRow>,
    pub(crate) transfer: Vec<Cell>,
    /// What else the times could be of, and are.
    pub(crate) readings: Vec<Reading>,
    readings_tried: usize,
    pub(crate) gains: Vec<Cell>,
    pub(crate) literature: Vec<Cell>,
}

/// A way to count by which both of the RFC's times come out.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Reading {
    pub(crate) words: String,
    pub(crate) token_bytes: u64,
    pub(crate) full_seconds: f64,
    pub(crate) delta_seconds: f64,
}

const TOLERANCE: &str = "agrees: the formula's value rounds to the figure, or lies in its interval; overlaps: a part of it does";

/// A figure with its digits.
#[derive(Debug, Clone, Copy)]
struct Said {
    value: f64,
    decimals: i32,
    unit: &'static str,
}

impl Said {
    const fn new(value: f64, decimals: i32, unit: &'static str) -> Self {
        Self {
            value,
            decimals,
            unit,
        }
    }

    fn is(&self, value: f64) -> bool {
        let half = 0.5 * 10_f64.powi(-self.decimals);
        (value - self.value).abs() <= half + 1e-9
    }

    fn text(&self) -> String {
        let decimals = usize::try_from(self.decimals).unwrap_or(0);
        format!("{:.decimals$} {}", self.value, self.unit)
    }

    fn of_bytes(&self, bytes: u64) -> Verdict {
        let (decimal, binary) = match self.unit {
            "GB" => (1e9, GIB),
            "MB" => (1e6, MIB),
            _ => (1024.0, 1024.0),
        };
        if self.is(bytes as f64 / decimal) {
            Verdict::Agrees
        } else if self.is(bytes as f64 / binary) {
            Verdict::AgreesInBinary
        } else {
            Verdict::Differs
        }
    }

    fn of_seconds(&self, seconds: f64) -> Verdict {
        match self.is(seconds) {
            true => Verdict::Agrees,
            false => Verdict::Differs,
        }
    }
}

const FULL: Said = Said::new(1.6, 1, "s");
const DELTA: Said = Said::new(0.2, 1, "s");

fn llama(dtype: Dtype) -> Result<Shape, ModelError> {
    let cache = Cache::Heads {
        kv_heads: KV_HEADS,
        key_dim: HEAD_DIM,
        value_dim: HEAD_DIM,
    };
    let layers = Layers {
        count: LAYERS,
        window_tokens: None,
    };
    Shape::new(cache, vec![layers], dtype)
}

fn work() -> Work {
    Work {
        params: PARAMS,
        attention: Some(Attention {
            heads: HEADS,
            key_dim: HEAD_DIM,
            value_dim: HEAD_DIM,
        }),
        layers: vec![Layers {
            count: LAYERS,
            window_tokens: None,
        }],
    }
}

fn request((prompt, cached): (u64, u64)) -> Result<Request> {
    Ok(Request::new(prompt, cached, BLOCK_TOKENS)?)
}

impl Rfc {
    /// Everything by formula.
    pub(crate) fn new() -> Result<Self> {
        let shape = llama(Dtype::Fp16)?;
        let scale = SCALE.map(|row| ScaleRow::new(&shape, row));
        let scale = scale.into_iter().collect::<Result<Vec<_>>>()?;
        let (readings, readings_tried) = readings()?;
        Ok(Self {
            version: VERSION,
            tolerance: TOLERANCE,
            model: format!(
                "Llama 70B: {LAYERS} layers, {KV_HEADS} KV heads of {HEAD_DIM}, fp16, {} a token",
                binary_bytes(shape.token_bytes(1)?)
            ),
            transfer: transfer(&shape, &scale)?,
            scale,
            readings,
            readings_tried,
            gains: gains(&shape)?,
            literature: literature(&shape)?,
        })
    }
}

impl ScaleRow {
    fn new(shape: &Shape, row: (u64, u64)) -> Result<Self> {
        let Sizes {
            full_bytes,
            delta_bytes,
            ..
        } = Sizes::in_all(shape, 1, &request(row)?)?;
        let (half_full_bytes, half_delta_bytes) = (full_bytes / 2, delta_bytes / 2);
        Ok(Self {
            prompt_tokens: row.0,
            cached_tokens: row.1,
            saved_share: (full_bytes - delta_bytes) as f64 / full_bytes as f64,
            full_bytes,
            delta_bytes,
            full_seconds: LINK.seconds(full_bytes),
            delta_seconds: LINK.seconds(delta_bytes),
            half_full_bytes,
            half_delta_bytes,
            half_full_seconds: LINK.seconds(half_full_bytes),
            half_delta_seconds: LINK.seconds(half_delta_bytes),
        })
    }
}

/// The RFC's bytes a token and times.
fn transfer(shape: &Shape, scale: &[ScaleRow]) -> Result<Vec<Cell>, ModelError> {
    let half = Said::new(160.0, 0, "KiB");
    let token = shape.token_bytes(1)?;
    let mut cells = vec![Cell {
        figure: "KV a token".to_owned(),
        said: half.text(),
        formula: binary_bytes(token),
        verdict: half.of_bytes(token),
        remark: "inferred: its bytes are half of what others have".to_owned(),
    }];
    if let Some(row) = scale.last() {
        let tokens = count(row.prompt_tokens);
        for (what, said, formula, half) in [
            ("full", FULL, row.full_seconds, row.half_full_seconds),
            ("delta", DELTA, row.delta_seconds, row.half_delta_seconds),
        ] {
            cells.push(Cell {
                figure: format!("{what}, {tokens} tokens at 100 Gbit/s"),
                said: said.text(),
                formula: seconds(formula),
                verdict: said.of_seconds(formula),
                remark: format!("at 160 KiB a token {}", seconds(half)),
            });
        }
    }
    Ok(cells)
}

/// Which ways to count give both of the RFC's times, and how many were tried.
fn readings() -> Result<(Vec<Reading>, usize)> {
    let Some(&row) = SCALE.last() else {
        return Ok((Vec::new(), 0));
    };
    let (mut readings, mut tried) = (Vec::new(), 0);
    for dtype in [Dtype::Fp16, Dtype::Fp8, Dtype::Nvfp4] {
        let shape = llama(dtype)?;
        for tp in [1, 2, 4, 8] {
            let rank = Sizes::a_rank(&shape, tp, &request(row)?)?;
            for (what, part) in [("keys and values", 1), ("keys or values alone", 2)] {
                for (unit, scale) in [("", 1.0), (", GiB taken for GB", 1e9 / GIB)] {
                    tried += 1;
                    let time = |bytes: u64| LINK.seconds(bytes / part) * scale;
                    let (full_seconds, delta_seconds) =
                        (time(rank.full_bytes), time(rank.delta_bytes));
                    if FULL.is(full_seconds) && DELTA.is(delta_seconds) {
                        let ranks = match tp {
                            1 => String::new(),
                            _ => format!(", one of {tp} ranks"),
                        };
                        readings.push(Reading {
                            words: format!("{dtype}, {what}{ranks}{unit}"),
                            token_bytes: shape.token_bytes(tp)? / part,
                            full_seconds,
                            delta_seconds,
                        });
                    }
                }
            }
        }
    }
    Ok((readings, tried))
}

/// The RFC's expected gains, each with the row of the same place in its table of scale.
fn gains(shape: &Shape) -> Result<Vec<Cell>> {
    let device = Device::named(DEVICE)?;
    let speed = Speed::of_device(work(), device, Precision::Bf16, DEVICES, UTILISATION)?;
    let mut cells = Vec::new();
    for ((traffic, ttft, bandwidth), row) in GAINS.into_iter().zip(SCALE) {
        let request = request(row)?;
        let sizes = Sizes::in_all(shape, 1, &request)?;
        let (full, delta) = (
            LINK.seconds(sizes.full_bytes),
            LINK.seconds(sizes.delta_bytes),
        );
        let saved = 100.0 * (full - delta) / full;
        let tokens = format!("{} of {} cached", count(row.1), count(row.0));
        cells.push(Cell {
            figure: format!("{traffic}: bandwidth saved"),
            said: interval(bandwidth),
            formula: interval((saved, saved)),
            verdict: compare(bandwidth, (saved, saved)),
            remark: format!("the cached share: {tokens}"),
        });
        // P computes all of the prompt, or holds as much of it as D.
        let prefills = [0, request.overlap_tokens()].map(|from| speed.seconds(from, row.0));
        let gain = prefills.map(|prefill| 100.0 * (full - delta) / (prefill + full));
        let share = prefills.map(|prefill| 100.0 * full / (prefill + full));
        let needed = (100.0 * ttft.0 / bandwidth.0, 100.0 * ttft.1 / bandwidth.1);
        cells.push(Cell {
            figure: format!("{traffic}: TTFT"),
            said: interval(ttft),
            formula: interval((gain[0], gain[1])),
            verdict: compare(ttft, (gain[0], gain[1])),
            remark: format!(
                "takes a transfer of {} of TTFT; it is {}",
                interval(needed),
                interval((share[0], share[1]))
            ),
        });
    }
    Ok(cells)
}

fn interval((low, high): Interval) -> String {
    if low == high {
        return format!("{low:.1} %");
    }
    format!("{low:.0}..{high:.0} %")
}

fn compare(said: Interval, formula: Interval) -> Verdict {
    if said.0 <= formula.0 && formula.1 <= said.1 {
        Verdict::Agrees
    } else if said.0 <= formula.1 && formula.0 <= said.1 {
        Verdict::Overlaps
    } else {
        Verdict::Differs
    }
}

/// Figures of others on models of the same and of one other shape.
fn literature(llama: &Shape) -> Result<Vec<Cell>, ModelError> {
    let token = llama.token_bytes(1)?;
    let rank = llama.token_bytes(8)?;
    let latent = Cache::Latent {
        rank: 512,
        rope_dim: 64,
    };
    let layers = Layers {
        count: 61,
        window_tokens: None,
    };
    let deepseek = Shape::new(latent, vec![layers], Dtype::Bf16)?.token_bytes(1)?;
    let cell = |figure: &str, said: Said, bytes: u64, remark: &str| Cell {
        figure: figure.to_owned(),
        said: said.text(),
        formula: shown(said, bytes),
        verdict: said.of_bytes(bytes),
        remark: remark.to_owned(),
    };
    Ok(vec![
        cell("70B, a token", Said::new(320.0, 0, "KiB"), token, ""),
        cell(
            "70B, 32,000 tokens",
            Said::new(10.5, 1, "GB"),
            32_000 * token,
            "",
        ),
        cell("70B, 100 tokens", Said::new(33.0, 0, "MB"), 100 * token, ""),
        cell(
            "70B, 63,000 tokens",
            Said::new(20.8, 1, "GB"),
            63_000 * token,
            "630 x the rounded 33 MB is 20.8",
        ),
        cell(
            "70B, 16K tokens, one of 8 GPUs",
            Said::new(640.0, 0, "MB"),
            16_384 * rank,
            "KVDirect (paper), page 4",
        ),
        cell(
            "DeepSeek R1 (MLA, bf16), 4,096 tokens",
            Said::new(274.5, 1, "MB"),
            4_096 * deepseek,
            "vllm-ascend, RFC 2470",
        ),
        cell(
            "DeepSeek R1 (MLA, bf16), 131,072 tokens",
            Said::new(8.6, 1, "GB"),
            131_072 * deepseek,
            "vllm-ascend, RFC 2470",
        ),
    ])
}

/// The formula's value, in the figure's way to count.
fn shown(said: Said, value: u64) -> String {
    match (said.unit, said.of_bytes(value)) {
        ("KiB", _) => binary_bytes(value),
        (unit, Verdict::AgreesInBinary) => {
            let (scale, name) = match unit {
                "MB" => (MIB, "MiB"),
                _ => (GIB, "GiB"),
            };
            let decimals = usize::try_from(said.decimals).unwrap_or(0);
            let binary = value as f64 / scale;
            format!("{} ({binary:.decimals$} {name})", bytes(value))
        }
        _ => bytes(value),
    }
}

/// The tables as text.
pub(crate) fn text(rfc: &Rfc) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{}; 100 Gbit/s\n{}\n\nScale of impact: the RFC's rows by formula; its own bytes are the half\n",
        rfc.model, rfc.tolerance
    );
    text.push_str(&scale(&rfc.scale));
    text.push_str("\nThe RFC's transfer\n\n");
    text.push_str(&cells(&rfc.transfer));
    let _ = writeln!(
        text,
        "\nWays to count that give both times, of {} tried\n",
        rfc.readings_tried
    );
    text.push_str(&read(&rfc.readings));
    let _ = writeln!(
        text,
        "\nThe RFC's expected gains, by the scale's row of the same place; TTFT is prefill on {DEVICES} {DEVICE} at \
         {UTILISATION}\nof their bf16 peak and the transfer, where P holds nothing .. as much of the prompt as D\n"
    );
    text.push_str(&cells(&rfc.gains));
    text.push_str("\nOthers\n\n");
    text.push_str(&cells(&rfc.literature));
    text
}

fn scale(rows: &[ScaleRow]) -> String {
    let table = Table {
        columns: [
            ("prompt", Right),
            ("cached", Right),
            ("saved", Right),
            ("full", Right),
            ("delta", Right),
            ("full", Right),
            ("delta", Right),
            ("half: full", Right),
            ("delta", Right),
            ("full", Right),
            ("delta", Right),
        ],
        rows: rows
            .iter()
            .map(|row| {
                [
                    count(row.prompt_tokens),
                    count(row.cached_tokens),
                    percent(row.saved_share),
                    bytes(row.full_bytes),
                    bytes(row.delta_bytes),
                    seconds(row.full_seconds),
                    seconds(row.delta_seconds),
                    bytes(row.half_full_bytes),
                    bytes(row.half_delta_bytes),
                    seconds(row.half_full_seconds),
                    seconds(row.half_delta_seconds),
                ]
            })
            .collect(),
    };
    table.text()
}

fn cells(cells: &[Cell]) -> String {
    let table = Table {
        columns: [
            ("figure", Left),
            ("said", Right),
            ("formula", Right),
            ("", Left),
            ("", Left),
        ],
        rows: cells
            .iter()
            .map(|cell| {
                [
                    cell.figure.clone(),
                    cell.said.clone(),
                    cell.formula.clone(),
                    cell.verdict.text().to_owned(),
                    cell.remark.clone(),
                ]
            })
            .collect(),
    };
    table.text()
}

fn read(readings: &[Reading]) -> String {
    let table = Table {
        columns: [
            ("counted", Left),
            ("a token", Right),
            ("full", Right),
            ("delta", Right),
        ],
        rows: readings
            .iter()
            .map(|reading| {
                [
                    reading.words.clone(),
                    binary_bytes(reading.token_bytes),
                    seconds(reading.full_seconds),
                    seconds(reading.delta_seconds),
                ]
            })
            .collect(),
    };
    table.text()
}

#[cfg(test)]
mod tests;
