# SPDX-License-Identifier: Apache-2.0
"""Trainings as text: what a recipe may say, and how it is read and checked before anything starts."""

from hyper_parallel.recipe.errors import RecipeError
from hyper_parallel.recipe.reading import read_recipe
from hyper_parallel.recipe.schema import Recipe

__all__ = ["Recipe", "RecipeError", "read_recipe"]
