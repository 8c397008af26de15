# SPDX-License-Identifier: Apache-2.0
"""The check of a rule: every choice of every mesh axis against the plain operator."""
