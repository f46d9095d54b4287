// SPDX-License-Identifier: Apache-2.0

//! A replay as SVG: what is saved and how even the load is, over the weight or over the number of decode workers.

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::{
    ChartBuilder, Circle, DrawingArea, IntoDrawingArea, LineSeries, PathElement, RGBColor,
    SVGBackend, Text, WHITE,
};
use plotters::style::Color;

use super::report::{Report, Row};

const SIZE: (u32, u32) = (880, 380);
const HEAD: u32 = 74;
const FONT: &str = "sans-serif";
/// Colours that also those tell apart who see few (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(110, 110, 110),
];
/// Names in a line of the legend.
const NAMES: usize = 5;

/// Names of the places on the horizontal axis, and what stands there.
#[derive(Debug, PartialEq)]
struct Axis {
    title: &'static str,
    places: Vec<String>,
    lines: Vec<Line>,
}

/// One way to choose: what it saves in per cent, and its imbalance.
#[derive(Debug, PartialEq)]
struct Line {
    name: String,
    values: Vec<[Option<f64>; 2]>,
}

/// The chart. Of several numbers of decode workers these are the horizontal axis, of one number the weights.
///
/// # Errors
/// If there is nothing to draw.
pub(crate) fn svg(report: &Report) -> Result<String> {
    let axis = if report.fleets().len() > 1 {
        over_fleets(report)
    } else {
        over_weights(report)
    };
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(HEAD);
        let title = format!(
            "{} requests, {} blocks of {} tokens a decode worker",
            report.trace.requests, report.settings.capacity, report.trace.block_size_tokens
        );
        draw_head(&head, &title, &axis)?;
        let measures = ["saved, % of the bytes", "imbalance, largest load by mean"];
        for ((measure, name), area) in measures.iter().enumerate().zip(body.split_evenly((1, 2))) {
            draw(&area, &axis, measure, name)?;
        }
        root.present()?;
    }
    Ok(svg + "\n")
}

fn values(row: &Row) -> [Option<f64>; 2] {
    let outcome = &row.outcome;
    [Some(outcome.saved_share * 100.0), outcome.imbalance]
}

/// The line of that name; a new one has no values at its places.
fn named<'a>(lines: &'a mut Vec<Line>, name: &str, places: usize) -> &'a mut Line {
    let at = lines.iter().position(|line| line.name == name);
    let at = at.unwrap_or_else(|| {
        lines.push(Line {
            name: name.to_owned(),
            values: vec![[None; 2]; places],
        });
        lines.len() - 1
    });
    &mut lines[at]
}

/// A line for each policy; those without a weight are level.
fn over_weights(report: &Report) -> Axis {
    let mut weights: Vec<f64> = report.rows.iter().filter_map(|row| row.weight).collect();
    weights.sort_unstable_by(f64::total_cmp);
    weights.dedup();
    let mut lines: Vec<Line> = Vec::new();
    let places = weights.len().max(2);
    for row in &report.rows {
        let place = row
            .weight
            .and_then(|of| weights.iter().position(|one| *one == of));
        let line = named(&mut lines, row.policy, places);
        match place {
            Some(place) => line.values[place] = values(row),
            None => line.values.fill(values(row)),
        }
    }
    let mut places: Vec<String> = weights.iter().map(f64::to_string).collect();
    places.resize(places.len().max(2), String::new());
    Axis {
        title: "weight",
        places,
        lines,
    }
}

/// A line for each policy with each weight.
fn over_fleets(report: &Report) -> Axis {
    let fleets = report.fleets();
    let mut lines: Vec<Line> = Vec::new();
    for row in &report.rows {
        let line = named(&mut lines, &row.label, fleets.len());
        if let Some(place) = fleets.iter().position(|fleet| *fleet == row.decode) {
            line.values[place] = values(row);
        }
    }
    Axis {
        title: "decode workers",
        places: fleets.iter().map(usize::to_string).collect(),
        lines,
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn colours(lines: &[Line]) -> impl Iterator<Item = (&Line, RGBColor)> {
    lines.iter().zip(COLOURS.into_iter().cycle())
}

fn draw_head(head: &Area<'_>, title: &str, axis: &Axis) -> Result<()> {
    head.draw(&Text::new(title.to_owned(), (12, 8), (FONT, 16)))?;
    for (place, (line, colour)) in colours(&axis.lines).enumerate() {
        let left = 12 + 172 * i32::try_from(place % NAMES)?;
        let top = 40 + 18 * i32::try_from(place / NAMES)?;
        head.draw(&PathElement::new(
            [(left, top), (left + 18, top)],
            colour.stroke_width(2),
        ))?;
        head.draw(&Text::new(
            line.name.clone(),
            (left + 24, top - 7),
            (FONT, 13),
        ))?;
    }
    Ok(())
}

fn draw(area: &Area<'_>, axis: &Axis, measure: usize, name: &str) -> Result<()> {
    let all = axis.lines.iter().flat_map(|line| &line.values);
    let most = all.filter_map(|values| values[measure]).reduce(f64::max);
    let most = most.context("there is nothing to draw")?;
    let places = axis.places.len();
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(48)
        .build_cartesian_2d(-0.3..places as f64 - 0.7, 0.0..most * 1.1)?;
    let label = |at: &f64| {
        let places = axis.places.iter().enumerate();
        let mut here = places.filter(|(place, _)| (*place as f64 - at).abs() < 1e-6);
        here.next()
            .map(|(_, label)| label.clone())
            .unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(RGBColor(238, 238, 238))
        .x_labels(places)
        .x_label_formatter(&label)
        .x_desc(axis.title)
        .y_labels(6)
        .max_light_lines(0)
        .y_desc(name)
        .label_style((FONT, 12))
        .draw()?;
    for (line, colour) in colours(&axis.lines) {
        let values = line.values.iter().enumerate();
        let points: Vec<(f64, f64)> = values
            .filter_map(|(place, values)| Some((place as f64, values[measure]?)))
            .collect();
        chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?;
        let dots = points
            .into_iter()
            .map(|at| Circle::new(at, 3, colour.filled()));
        chart.draw_series(dots)?;
    }
    Ok(())
}
