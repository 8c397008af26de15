# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints: saved on one mesh, loaded on any other; whole or not at all; nothing is unpickled."""
