// SPDX-License-Identifier: Apache-2.0

//! Small charts beside each other as one SVG: a median with its quartiles of each series in each category.

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

const PANEL: (u32, u32) = (310, 230);
const HEAD: u32 = 62;
/// What the title and the names of four series take.
const HEAD_WIDTH: u32 = 640;
const FONT: &str = "sans-serif";
/// Colours that also those tell apart who see few (Okabe and Ito).
const COLOURS: [RGBColor; 4] = [
    RGBColor(110, 110, 110),
    RGBColor(230, 159, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
];

/// A chart.
#[derive(Debug)]
pub(crate) struct Chart {
    /// Stands above all.
    pub(crate) title: String,
    /// What the categories are.
    pub(crate) category: String,
    /// Names of the series; there are colours for four.
    pub(crate) series: Vec<String>,
    /// Rows of equal length.
    pub(crate) rows: Vec<Row>,
}

/// Panels with the same range of values.
#[derive(Debug)]
pub(crate) struct Row {
    /// What is measured, with its unit.
    pub(crate) measure: String,
    /// Whether the values go up by factors.
    pub(crate) logarithmic: bool,
    /// From left to right.
    pub(crate) panels: Vec<Panel>,
}

/// One of the small charts.
#[derive(Debug)]
pub(crate) struct Panel {
    /// Stands above it.
    pub(crate) title: String,
    /// Names of the categories, from left to right.
    pub(crate) categories: Vec<String>,
    /// Of each series in each category: median, lower and upper quartile; `None` where there is nothing.
    pub(crate) values: Vec<Vec<Option<[f64; 3]>>>,
}

impl Chart {
    /// The chart as SVG.
    pub(crate) fn svg(&self) -> Result<String> {
        let columns = self.rows.first().map_or(0, |row| row.panels.len());
        let size = (
            (PANEL.0 * u32::try_from(columns)?).max(HEAD_WIDTH),
            HEAD + PANEL.1 * u32::try_from(self.rows.len())?,
        );
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            root.fill(&WHITE)?;
            let (head, body) = root.split_vertically(HEAD);
            self.draw_head(&head)?;
            let rows = body.split_evenly((self.rows.len(), 1));
            for (row, area) in self.rows.iter().zip(&rows) {
                let [low, high] = row.range().context("there is nothing to draw")?;
                for (panel, area) in row.panels.iter().zip(area.split_evenly((1, columns))) {
                    if row.logarithmic {
                        // Whole powers of ten, so that the axis has them as its numbers.
                        let range = power(low.log10().floor())..power((high * 1.01).log10().ceil());
                        self.draw(row, panel, &area, range.log_scale())?;
                    } else {
                        self.draw(row, panel, &area, 0.0..high * 1.1)?;
                    }
                }
            }
            root.present()?;
        }
        Ok(svg + "\n")
    }

    fn draw_head(&self, head: &Area<'_>) -> Result<()> {
        head.draw(&Text::new(self.title.clone(), (12, 10), (FONT, 17)))?;
        let mut left = 12;
        for (name, colour) in self.series.iter().zip(COLOURS) {
            head.draw(&Circle::new((left + 5, 44), 4, colour.filled()))?;
            head.draw(&Text::new(name.clone(), (left + 14, 37), (FONT, 14)))?;
            left += 34 + 7 * i32::try_from(name.len())?;
        }
        Ok(())
    }

    fn draw<Y>(
        &self,
        row: &Row,
        panel: &Panel,
        area: &Area<'_>,
        values: impl AsRangedCoord<CoordDescType = Y, Value = f64>,
    ) -> Result<()>
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let categories = panel.categories.len();
        let mut chart = ChartBuilder::on(area)
            .caption(&panel.title, (FONT, 14))
            .margin(6)
            .x_label_area_size(38)
            .y_label_area_size(52)
            .build_cartesian_2d(-0.5..categories as f64 - 0.5, values)?;
        let name = |place: &f64| {
            let named = panel.categories.iter().enumerate();
            let mut here = named.filter(|(index, _)| (*index as f64 - place).abs() < 1e-6);
            here.next()
                .map(|(_, name)| name.clone())
                .unwrap_or_default()
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(RGBColor(238, 238, 238))
            .x_labels(categories)
            .x_label_formatter(&name)
            .x_desc(&self.category)
            .y_labels(6)
            .y_label_formatter(&|value| value.to_string())
            .y_desc(&row.measure)
            .label_style((FONT, 11))
            .draw()?;
        let middle = (self.series.len() as f64 - 1.0) / 2.0;
        for (index, (values, colour)) in panel.values.iter().zip(COLOURS).enumerate() {
            let aside = (index as f64 - middle) * 0.13;
            let places = values.iter().enumerate();
            let there: Vec<(f64, [f64; 3])> = places
                .filter_map(|(place, value)| Some((place as f64 + aside, (*value)?)))
                .collect();
            chart.draw_series(LineSeries::new(
                there.iter().map(|&(place, [median, ..])| (place, median)),
                colour.mix(0.4),
            ))?;
            chart.draw_series(there.iter().map(|&(place, [median, low, high])| {
                ErrorBar::new_vertical(place, low, median, high, colour.filled(), 6)
            }))?;
        }
        Ok(())
    }
}

fn power(exponent: f64) -> f64 {
    10_f64.powf(exponent)
}

impl Row {
    /// The least and the greatest value of all panels.
    fn range(&self) -> Option<[f64; 2]> {
        let panels = self.panels.iter();
        let values = panels.flat_map(|panel| panel.values.iter().flatten().flatten().flatten());
        values.fold(None, |range, &value| {
            let [low, high] = range.unwrap_or([value, value]);
            Some([value.min(low), value.max(high)])
        })
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: Vec<Vec<Option<[f64; 3]>>>) -> Chart {
        Chart {
            title: "Times & shares".to_owned(),
            category: "share".to_owned(),
            series: vec!["one".to_owned(), "two".to_owned()],
            rows: vec![Row {
                measure: "ms".to_owned(),
                logarithmic: true,
                panels: vec![Panel {
                    title: "50 Mbit/s".to_owned(),
                    categories: vec!["none".to_owned(), "half".to_owned()],
                    values,
                }],
            }],
        }
    }

    #[test]
    fn every_value_is_drawn_under_its_category() {
        let some = Some([20.0, 10.0, 30.0]);
        let svg = chart(vec![vec![some, some], vec![some, None]])
            .svg()
            .unwrap();
        for text in [
            "Times &amp; shares",
            "50 Mbit/s",
            "none",
            "half",
            "one",
            "two",
        ] {
            assert!(svg.contains(text), "no {text:?} in\n{svg}");
        }
        // One in the head for each series, one for each value.
        assert_eq!(svg.matches("<circle").count(), 2 + 3);
    }

    #[test]
    fn a_chart_of_nothing_is_an_error() {
        assert!(chart(vec![vec![None, None]]).svg().is_err());
    }
}
